"""The process of a rank: `python -m headrace_engine.distributed RANK SIZE COMMANDS_FD LOGS_FD`.

Started by rank 0 only, and gone with it: by the kernel on Linux, elsewhere when its connection
breaks. Signals to the process group are rank 0's to answer.
"""

import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread

from .relay import RelayHandler

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Returns the process's exit code."""
    rank, size, command_number, log_number = map(int, arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    connection, logs = Connection(command_number), Connection(log_number)
    Thread(target=_watch, args=(logs,), daemon=True).start()
    # torch takes seconds to load, in which rank 0 may end.
    from . import commands
    from .rank import serve

    with suppress(commands.Gone):
        greeting = commands.introduction(connection)
        logging.basicConfig(level=greeting["level"], handlers=[RelayHandler(logs)])
        logging.captureWarnings(True)
        return serve(rank, size, connection, greeting)
    return 0


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(logs: Connection) -> None:
    """Rank 0 sends nothing here: what comes is its end."""
    with suppress(EOFError, OSError):
        logs.recv_bytes()
    os._exit(1)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a group that is broken may hang when it is taken down
