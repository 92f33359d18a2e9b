"""The memory that one client can make a gateway process use, as counted by the kernel."""

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
    """A process that is warm: it has answered a request of the largest size."""
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
    """The peak of the process's memory during the attack, over its memory before."""
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # resets the peak
    before = _kib(process, "VmRSS")
    attack()
    return (_kib(process, "VmHWM") - before) / 1024


def _kib(process: HeadraceProcess, field: str) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def send(process: GatewayProcess, *pieces: bytes) -> bytes:
    """Sends bytes; returns the answer until the connection closes."""
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


def chat(messages: bytes) -> tuple[str, bytes]:
    return "/v1/chat/completions", b'{"messages":%b}' % messages


def listed(item: bytes, mib: int) -> bytes:
    """A list of this size."""
    return b"[%b%b]" % ((item + b",") * (mib * MIB // (len(item) + 1) - 101), item)


def members(mib: int) -> bytes:
    return b",".join(b'"%06d":1' % number for number in range(mib * MIB // 11))


USER = b'{"role":"user","content":"x"}'
CONTENT = b'[{"role":"user","content":%b}]'
CALLS = b'[{"role":"assistant","tool_calls":%b}]'
# Made when a test needs them, and not by every process that collects this file.
BODIES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "wrong parts": lambda: chat(CONTENT % listed(b"1", 2)),
    "more wrong parts": lambda: chat(CONTENT % listed(b"1", 7)),
    "empty parts": lambda: chat(CONTENT % listed(b"{}", 7)),
    "messages of nothing": lambda: chat(listed(b"null", 7)),
    "lists as messages": lambda: chat(listed(b"[]", 7)),
    "unknown parts": lambda: chat(CONTENT % listed(b'{"a":1}', 7)),
    "wrong calls": lambda: chat(CALLS % listed(b"0", 2)),
    "unknown fields": lambda: chat(b"[%b],%b" % (USER, members(7))),
    "fewer unknown fields": lambda: chat(b"[%b],%b" % (USER, members(1)[: 11 * 40_000 - 1])),
    "unknown fields of a message": lambda: chat(b'[{"role":"user",%b}]' % members(7)),
    "wrong ids": lambda: ("/v1/completions", b'{"prompt":%b}' % listed(b"-1", 2)),
    "wrong items": lambda: ("/v1/responses", b'{"input":%b}' % (CONTENT % listed(b"1", 2))),
    "wrong blocks": lambda: (
        "/v1/messages",
        b'{"max_tokens":1,"messages":%b}' % (CONTENT % listed(b"1", 2)),
    ),
    "long name of a field": lambda: (
        "/v1/completions",
        b'{"prompt":"a","%b":1}' % (b"a" * 7 * MIB),
    ),
    "long user": lambda: ("/v1/completions", b'{"prompt":"a","user":"%b"}' % (b"a" * 7 * MIB)),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_body_of_wrong_values_costs_little_more_than_its_bytes(
    process: GatewayProcess, body: Callable[[], tuple[str, bytes]]
) -> None:
    path, content = body()
    answers: list[httpx.Response] = []

    assert growth_mib(process, lambda: answers.append(post(process, path, content))) < 128

    assert answers[0].status_code == 400
    assert len(answers[0].content) < 2000


@pytest.mark.parametrize("word", [b"word and ", b"<|im_end|> a "], ids=["words", "special tokens"])
def test_a_long_text_is_tokenised_in_pieces(process: GatewayProcess, word: bytes) -> None:
    body = b'{"prompt":"%b"}' % (word * (MIB // len(word)))
    answers: list[httpx.Response] = []

    assert growth_mib(process, lambda: answers.append(post(process, "/tokenize", body))) < 86

    assert answers[0].json()["count"] > MIB / 8
