"""Ranks forked from their engine, which has imported what they import: a start takes no second.

`headrace_testing.forked` calls `install` in an engine that it forks.
"""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from subprocess import DEVNULL
from types import SimpleNamespace

from headrace_engine.distributed import __main__ as program
from headrace_engine.distributed import process


def install(_module: str) -> None:
    """Makes this engine fork its ranks."""
    vars(process)["subprocess"] = SimpleNamespace(Popen=ForkedRank, DEVNULL=DEVNULL)


class ForkedRank:
    """A child that becomes `python -m headrace_engine.distributed`: the used part of Popen."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, pass_fds: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self.returncode: int | None = None
        _, _, _, *arguments = command
        kept = list(map(int, pass_fds))
        self.pid = os.fork()
        if not self.pid:
            _become(arguments, kept, env)

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _become(arguments: list[str], kept: Sequence[int], env: Mapping[str, str]) -> None:
    """Turns this process into a rank; does not return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in kept:
                with suppress(OSError):  # the listing's own
                    os.close(number)
        logging.getLogger().handlers.clear()
        os.environ.update(env)
        code = program.main(arguments)
    except BaseException:  # noqa: BLE001 - it is printed, and the process ends
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
