"""The processes of the path under test, on loopback: Valkey, a gateway, and what they cost.

CPU seconds come from the kernel's accounting of each process, so other work does not count.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from headrace_cli.servers.valkey import find_server
from headrace_common.text.checkpoint import DEMO_MODEL

MODEL = "demo"
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """A process and its address."""

    pid: int
    url: str

    def cpu_seconds(self) -> float:
        """CPU seconds in user and kernel mode: on loopback, these include the delivery of packets
        to their reader."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def valkey(folder: Path) -> Iterator[Server]:
    """Starts a Valkey server with an append-only file, as in production, reached over TCP."""
    port = free_port()
    options = ("--appendonly", "yes", "--appendfsync", "everysec", "--save", "")
    command = [str(find_server().path), "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--dir", str(folder), "--logfile", "", "--loglevel", "warning", *options]
    with _running(command, {}, folder / "valkey.log") as pid:
        _until(lambda: _answers(port), "Valkey")
        yield Server(pid, f"redis://127.0.0.1:{port}/0")


@contextlib.contextmanager
def gateway(
    redis_url: str,
    folder: Path,
    sealing_keys_file: Path | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """Starts a gateway; `more` are further settings, by their names without the prefix."""
    port = free_port()
    settings = {
        "REDIS_URL": redis_url,
        "MODEL": DEMO_MODEL,
        "SERVED_MODEL_NAME": MODEL,
        "PORT": str(port),
        "MAX_QUEUED_REQUESTS": "100000",
        "MAX_QUEUED_TOKENS": str(10**9),
        "LOG_LEVEL": "WARNING",
        **more,
    }
    if sealing_keys_file is not None:
        settings["SEALING_KEYS_FILE"] = str(sealing_keys_file)
    env = {f"HEADRACE_GATEWAY_{name}": value for name, value in settings.items()}
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "headrace_gateway"]
    with _running(command, env, folder / "gateway.log") as pid:
        _until(lambda: _healthy(url), "the gateway")
        yield Server(pid, url)


@contextlib.contextmanager
def _running(command: list[str], env: Mapping[str, str], log: Path) -> Iterator[int]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=output, stderr=output)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not start in {START_SECONDS:g} s")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/live", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
