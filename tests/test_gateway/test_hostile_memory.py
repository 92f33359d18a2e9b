"""What one client can make a real gateway process hold, as the kernel counts it."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from headrace_testing.processes import HeadraceProcess
from headrace_testing.stack import MODEL, GatewayProcess
from headrace_testing.valkey import ValkeyServer

MIB = 2**20
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def process(
    checkpoint: Path, valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """Warm: it has answered a request of the largest size."""
    log = tmp_path_factory.mktemp("gateway") / "log"
    with GatewayProcess(checkpoint, valkey.url, log, "--log-format", "json") as process:
        process.await_log("gateway ready")
        body = json.dumps({"model": MODEL, "prompt": "a" * 8_000_000}).encode()
        assert post(process, "/v1/completions", body).status_code == 400
        yield process


def post(process: GatewayProcess, path: str, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{process.url}{path}", content=body, headers=headers, timeout=60)


def growth_mib(process: HeadraceProcess, attack: Callable[[], object]) -> float:
    """How much more than before the attack the process holds at its worst moment."""
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak begins anew
    before = _kib(process, "VmRSS")
    attack()
    return (_kib(process, "VmHWM") - before) / 1024


def _kib(process: HeadraceProcess, field: str) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def send(process: GatewayProcess, *pieces: bytes) -> bytes:
    """All that is answered before the connection closes."""
    with socket.create_connection(("127.0.0.1", process.port), 60) as connection:
        with suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        answer = b""
        with suppress(ConnectionError):
            while received := connection.recv(65536):
                answer += received
    return answer


def test_trailers_hold_no_memory(process: GatewayProcess) -> None:
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    attack = partial(send, process, head, *[b"A: \r\n" * 13_107] * 320)

    assert growth_mib(process, attack) < 32
