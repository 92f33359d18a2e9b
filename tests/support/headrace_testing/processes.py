"""Real Headrace processes for tests: started, signalled and ended by their own pid."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

START_TIMEOUT_S = 200.0


class Running(Protocol):
    """A started process: the part of subprocess.Popen that is used."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


# The module, its arguments, the file for its output, its whole environment.
Starter = Callable[[str, Sequence[str], Path, Mapping[str, str]], Running]


def start_program(
    module: str,
    arguments: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    python: str = sys.executable,
) -> Running:
    """Starts `python -m module arguments`."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [python, "-m", module, *arguments],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env=dict(env),
        )


def until(condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Waits until a condition holds; fails the test with `what` after a generous limit.

    A slow condition is checked less often, and so is one that does not hold for seconds, to leave
    the processors to the processes that it waits for.
    """
    start = begun = time.monotonic()
    while not condition():
        now = time.monotonic()
        if now > start + timeout_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}")
        slow, long = min(0.1, 2 * (now - begun)), min(0.25, (now - start) / 20)
        time.sleep(max(0.02, slow, long))
        begun = time.monotonic()


class HeadraceProcess:
    """One `python -m MODULE ARGUMENTS`, its log in a file; killed when the block ends.

    `env` extends our own environment.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        start: Starter = start_program,
    ) -> None:
        self.name = log.stem
        self.log = log
        given = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._process = start(module, arguments, log, given)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if self.alive:
            self.signal(signal.SIGKILL)
        self._process.wait()

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """The exit status once the process has ended."""
        return self._process.wait(timeout_s)

    def log_entries(self) -> list[dict[str, object]]:
        """Every JSON line that it has logged."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    def logged(self, message: str) -> dict[str, object] | None:
        """The first JSON log line with this message; fails the test if the process has died."""
        for entry in self.log_entries():
            if entry.get("message") == message:
                return entry
        if not self.alive:
            raise AssertionError(f"{self.name} ended:\n{self.log.read_text()[-4000:]}")
        return None

    def await_log(self, message: str) -> dict[str, object]:
        """Waits for a log line and returns its fields."""
        until(lambda: self.logged(message) is not None, f"{self.name} to log {message!r}")
        entry = self.logged(message)
        assert entry is not None
        return entry


@contextmanager
def frozen(processes: Sequence[HeadraceProcess]) -> Iterator[None]:
    """Pauses the processes until the block ends."""
    stopped = tuple(processes)
    for process in stopped:
        process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in stopped:
            process.signal(signal.SIGCONT)
