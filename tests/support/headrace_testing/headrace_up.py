"""The real `headrace up`, started as a person starts it, with everything embedded."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from headrace_cli.running import find_running

from .pids import alive
from .processes import START_TIMEOUT_S, until
from .valkey import free_port

MODEL = "headrace-demo"
HEADRACE = Path(sys.executable).with_name("headrace")


class UpProcess:
    """A running `headrace up`. Without a `port` it takes a free one. Killed when the block ends.

    `env` extends our own environment.
    """

    def __init__(
        self,
        folder: Path,
        *args: str,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.data = folder / "data"
        self._output = folder / "up.log"
        command = [str(HEADRACE), "up", "--port", str(self.port), "--data-dir", str(self.data)]
        clean = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
        with self._output.open("ab") as out:
            self._popen = subprocess.Popen(
                [*command, *args],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env={**clean, **(env or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def printed(self) -> str:
        return self._output.read_text()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def until_served(self, model: str = MODEL) -> None:
        """Waits for the line that tells the user where the API is."""
        line = f"{model} is served at {self.url}/v1"
        until(lambda: line in self.printed or self._popen.poll() is not None, "up to serve")
        assert line in self.printed, self.printed

    def metrics_port(self, name: str) -> int:
        """Where a process such as `engine-0` serves its metrics; waits for its log to say so."""
        log = self.data / "logs" / f"{name}.log"

        def ports() -> list[str]:
            return re.findall(r'"url": "http://[^"]+:(\d+)"', log.read_text())

        until(lambda: bool(ports()), f"{name} to open its metrics port, see {log}")
        return int(ports()[-1])

    @property
    def redis_url(self) -> str:
        """The queue's URL, once the API is served."""
        running = find_running(self.data)
        assert running is not None, self.printed
        return running.redis

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def child(self, program: str) -> psutil.Process:
        """The only child whose command line contains this word."""
        (found,) = [process for process in self.children() if program in _words(process)]
        return found

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._popen.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """The exit status once it has ended."""
        return self._popen.wait(START_TIMEOUT_S)

    def close(self) -> None:
        if self._popen.poll() is None:
            self.interrupt()
            try:
                self._popen.wait(60)
            except subprocess.TimeoutExpired:
                self._popen.kill()  # its children die with it
        self._popen.wait()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(alive(process.pid) for process in processes)


def _words(process: psutil.Process) -> list[str]:
    """The words of a process's command line; none if it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
