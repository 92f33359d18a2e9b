"""Gateways and engines forked from a process that has imported them: a start takes 0.2 s, not 3.

Nothing else is shared: each has its own pid, sockets, environment, log and settings, and runs the
same `main` as a program of its own would.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock

import pytest

from headrace_cli.processes.guard import die_with_parent
from headrace_testing.processes import Running

_PRELOADED = "headrace_testing.forked_imports"


@cache
def _server() -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([_PRELOADED])
    return server


@contextmanager
def _own_server() -> Iterator[None]:
    """Starts processes from a server that has imported the programs. Gateways within the tests have
    another one, which tests may end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "connect_to_new_process", _server().connect_to_new_process)
        # Python 3.11 gives the server the path for modules only after it has imported them.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        yield


class Forge:
    """Starts processes; safe to use from several threads.

    `prepare` names a module whose `install` is called in each process with the name of the module
    that it is to become.
    """

    def __init__(self, prepare: str | None = None) -> None:
        self._prepare = prepare
        self._context = multiprocessing.get_context("forkserver")
        self._lock = Lock()

    def start(
        self, module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> Running:
        """Returns a function that starts processes."""
        given = (module, tuple(arguments), str(log), dict(env), self._prepare)
        with self._lock, _own_server():
            process = self._context.Process(target=_become, args=given, daemon=True)
            process.start()
        return ForkedRun(process, self._lock)


class ForkedRun:
    """One forked process. `lock` guards multiprocessing's shared state."""

    def __init__(self, process: BaseProcess, lock: Lock) -> None:
        self._process = process
        self._lock = lock
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        limit = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if limit is not None and time.monotonic() > limit:
                raise subprocess.TimeoutExpired(str(self._process.name), timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _become(
    module: str, arguments: Sequence[str], log: str, env: Mapping[str, str], prepare: str | None
) -> None:
    """Turns this process into `python -m module arguments`; does not return."""
    assert _PRELOADED in sys.modules, "the fork server has imported nothing"
    if sys.platform == "linux":
        die_with_parent()
    # otherwise it could not start processes itself
    multiprocessing.current_process().daemon = False
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if prepare is not None:
        import_module(prepare).install(module)
    code = import_module(f"{module}.__main__").main(list(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
