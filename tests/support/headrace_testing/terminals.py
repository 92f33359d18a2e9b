"""Runs a program on a terminal of its own, as a person does."""

import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from threading import Thread
from types import TracebackType
from typing import Self

from .processes import until

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[=>]|\][^\x07]*\x07)")


class TerminalProcess:
    """A process whose terminal has this many `columns`. Killed when the block ends."""

    def __init__(
        self, command: Sequence[str], *, columns: int = 80, env: Mapping[str, str] | None = None
    ) -> None:
        self._ours, theirs = pty.openpty()
        ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm", **(env or {})}
        environment.pop("COLUMNS", None)
        self._popen = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._bytes = b""
        self._reader = Thread(target=self._read)
        self._reader.start()

    @property
    def raw(self) -> str:
        """The written bytes, unchanged."""
        return self._bytes.decode(errors="replace")

    @property
    def text(self) -> str:
        """The written text, without escape sequences and with plain line ends."""
        return _ESCAPES.sub("", self.raw).replace("\r\n", "\n")

    def enter(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, text: str) -> None:
        """Waits until this text appears."""
        until(lambda: text in self.text or self._popen.poll() is not None, f"{text!r}")
        assert text in self.text, self.text

    def interrupt(self) -> None:
        self._popen.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Waits for the end, reads all output, and returns the exit status."""
        code = self._popen.wait(60)
        self._reader.join(60)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self.wait()
        os.close(self._ours)

    def _read(self) -> None:
        try:
            while data := os.read(self._ours, 65536):
                self._bytes += data
        except OSError:
            return  # the other end is closed
