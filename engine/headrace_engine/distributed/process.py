"""The process of another rank, as rank 0 sees it: its start, its logs, its end.

One thread for each rank starts it and stays until it ends. It must be one thread: on Linux the
kernel kills a rank when the thread that started it ends, so that no rank outlives rank 0.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from types import MappingProxyType
from typing import Any, Protocol

from .rank_logs import write_rank_logs

OnEnd = Callable[[int, str], None]

MODULE = "headrace_engine.distributed"
PACKAGES = ("headrace_engine", "headrace_common")


class RankHandle(Protocol):
    """A started rank."""

    rank: int
    commands: Connection
    # The address of its node for other nodes; None: its node is this one.
    host: str | None
    # Settings of which its node has its own.
    settings: Mapping[str, Any]

    def end(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for the rank to end, then kills it, even if it is stopped
        by SIGSTOP."""


class Launcher(Protocol):
    def __call__(self, rank: int, size: int, on_end: OnEnd) -> RankHandle:
        """Starts a rank. `on_end` is called once, from any thread, with the rank that ended and
        how."""


class RankProcess:
    """Runs `python -m headrace_engine.distributed` for one rank. `links` are its connections to
    node 0, for commands and for the store, if this is another node."""

    host: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, rank: int, size: int, on_end: OnEnd, links: tuple[Connection, ...] = ()
    ) -> None:
        self.rank, self._on_end = rank, on_end
        self.commands, commands = (links[0], links[0]) if links else Pipe()
        self._logs, logs = Pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        started = Event()
        ends = (commands, logs, *links[1:])
        numbers = [str(end.fileno()) for end in ends]
        command = [*_python(), str(rank), str(size), *numbers]
        self._thread = Thread(target=self._run, args=(command, ends, started), daemon=True)
        self._thread.name = f"rank-{rank}"
        self._thread.start()
        started.wait()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code once the process has ended; below 0: minus the signal that killed it."""
        return None if self._process is None else self._process.returncode

    def end(self, timeout: float) -> None:
        self._thread.join(timeout)
        if self._process is not None and self._thread.is_alive():
            self._process.kill()
            self._thread.join()
        self.commands.close()

    def _run(self, command: list[str], ends: tuple[Connection, ...], started: Event) -> None:
        try:
            numbers = [end.fileno() for end in ends]
            self._process = subprocess.Popen(  # noqa: S603 - this Python, numbers as arguments
                command, stdin=subprocess.DEVNULL, pass_fds=numbers, env=_environment()
            )
        except OSError as error:
            self._problem = f"cannot be started: {error}"
        for end in ends:
            end.close()
        started.set()
        write_rank_logs(self._logs, self.rank)
        self._logs.close()
        self._on_end(self.rank, self._problem or self._ending())

    def _ending(self) -> str:
        assert self._process is not None, "it was started, or there is a problem"
        code = self._process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _python() -> list[str]:
    return [sys.executable, "-m", MODULE]


def _environment() -> dict[str, str]:
    """Rank 0's environment, with the folders of our packages in PYTHONPATH."""
    folders = [
        str(Path(str(sys.modules[name].__file__)).parents[1])
        for name in PACKAGES
        if name in sys.modules
    ]
    with suppress(KeyError):
        folders.append(os.environ["PYTHONPATH"])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders))}
