"""The process of a rank:
`python -m headrace_engine.distributed RANK SIZE COMMANDS_FD LOGS_FD [STORE_FD]`.

Rank 0, or the process of another node, starts it. It ends with that process: on Linux through the
kernel, elsewhere when its connection breaks. Only that process answers signals to the process
group. STORE_FD is its connection to the store of node 0, if it is on another node.
"""

import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread

from .rank_logs import RankLogHandler

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Returns the process's exit code."""
    rank, size, command_number, log_number, *store_number = map(int, arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    connection, logs = Connection(command_number), Connection(log_number)
    Thread(target=_watch, args=(logs,), daemon=True).start()
    # Importing torch takes seconds, in which rank 0 may end.
    from . import commands
    from .rank import serve

    with suppress(commands.Disconnected):
        greeting = commands.introduction(connection)
        logging.basicConfig(level=greeting["level"], handlers=[RankLogHandler(logs)])
        logging.captureWarnings(True)
        store = Connection(store_number[0]) if store_number else None
        return serve(rank, size, connection, greeting, store)
    return 0


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(logs: Connection) -> None:
    """Waits for the end of the process that started this one, and exits: nothing is sent on this
    connection."""
    with suppress(EOFError, OSError):
        logs.recv_bytes()
    os._exit(1)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a broken process group may hang in its destructor
