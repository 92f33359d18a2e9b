"""The process of a rank: `python -m headrace_engine.distributed RANK SIZE COMMANDS_FD LOGS_FD`.

Only rank 0 starts it. It ends with rank 0: on Linux through the kernel, elsewhere when its
connection breaks. Rank 0 alone answers signals to the process group.
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
    rank, size, command_number, log_number = map(int, arguments)
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
        return serve(rank, size, connection, greeting)
    return 0


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(logs: Connection) -> None:
    """Waits for the end of rank 0, which sends nothing on this connection, and exits."""
    with suppress(EOFError, OSError):
        logs.recv_bytes()
    os._exit(1)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a broken process group may hang in its destructor
