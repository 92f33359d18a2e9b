"""One run of one child process: starts it, reads its output, ends it.

The child dies with this process. Nothing here polls. Restarts are decided elsewhere.
"""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from . import guard
from .logs import LineBuffer, LogLine, parse_line

TAIL_LINES = 12
# How long output may still arrive after the process has ended: a grandchild can hold the pipe open.
_FLUSH_SECONDS = 1.0
_STREAMS = {1: "stdout", 2: "stderr"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """The program to run. `env` is added to this process's environment.

    It may take `drain_seconds` to end. With `quiet`, lines that it writes before it is ready and
    while it stops are only logged, not shown.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()
    drain_seconds: float = 30.0
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended: exit code, or minus the signal, and its last lines."""

    code: int
    tail: tuple[str, ...]

    @property
    def reason(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        name = signal.Signals(-self.code).name
        hint = " (out of memory?)" if -self.code == signal.SIGKILL else ""
        return f"killed by {name}{hint}"


class Child(asyncio.SubprocessProtocol):
    """A running child. `on_line` gets every line it writes."""

    def __init__(self, on_line: Callable[[LogLine], None]) -> None:
        loop = asyncio.get_running_loop()
        self._on_line = on_line
        self._exited: asyncio.Future[int] = loop.create_future()
        self._flushed: asyncio.Future[None] = loop.create_future()
        self._buffers = {fd: LineBuffer() for fd in _STREAMS}
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._transport: asyncio.SubprocessTransport | None = None
        self._pipe: int | None = None

    @classmethod
    async def spawn(cls, spec: ChildSpec, on_line: Callable[[LogLine], None]) -> "Child":
        """Starts the program in its own process group. Raises OSError if it cannot be started."""
        child = cls(on_line)
        watched, child._pipe = os.pipe()
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: child,
                *_guarded(spec.argv, watched),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **spec.env},
                pass_fds=(*spec.pass_fds, watched),
                start_new_session=True,
            )
        finally:
            os.close(watched)
        return child

    @property
    def pid(self) -> int:
        assert self._transport is not None
        pid: int = self._transport.get_pid()
        return pid

    @property
    def running(self) -> bool:
        return not self._exited.done()

    async def wait(self) -> Exit:
        """Returns when the process has ended and its output is read."""
        code = await asyncio.shield(self._exited)
        self._signal_group(signal.SIGKILL)  # its remaining children
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._flushed), _FLUSH_SECONDS)
        self._close()
        return Exit(code, tuple(self._tail))

    def terminate(self) -> None:
        """Asks it to drain and end."""
        if self.running:
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and its descendants immediately."""
        if self.running:
            self._signal_group(signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self._group = transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        self._lines(fd, self._buffers[fd].feed(data))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd in self._buffers:
            self._lines(fd, self._buffers[fd].flush())

    def process_exited(self) -> None:
        assert self._transport is not None
        code = self._transport.get_returncode()
        assert code is not None
        self._exited.set_result(code)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._flushed.done():
            self._flushed.set_result(None)

    def _lines(self, fd: int, lines: list[str]) -> None:
        for text in lines:
            line = parse_line(text, _STREAMS[fd])
            self._tail.append(line.summary)
            self._on_line(line)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._group, number)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


def _guarded(argv: tuple[str, ...], watched: int) -> list[str]:
    return [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(watched), *argv]
