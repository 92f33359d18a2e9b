"""HTTP as bytes, clients that are slow, and too many clients: they are answered, and then
closed."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace_testing.gateway import MODEL, Gateway, serve
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def assert_works(gateway: Gateway) -> None:
    assert (await gateway.complete()).status_code == 200


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BROKEN, LARGE = (400, "invalid_http"), (431, "headers_too_large")
LONG_TARGET = (414, "target_too_long")
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
RAW_REQUESTS: dict[str, tuple[bytes, tuple[int, str]]] = {
    "no http": (b"\x16\x03\x01 hello\r\n\r\n", BROKEN),
    "bad length": (HEAD + b"content-length: -5\r\n\r\n", BROKEN),
    "length in words": (HEAD + b"content-length: many\r\n\r\n", BROKEN),
    "two lengths": (HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", BROKEN),
    "missing length": (HEAD + b"\r\n", (400, "invalid_json")),
    "giant length": (
        HEAD + b"content-length: 99999999999999999\r\n\r\n{",
        (413, "request_too_large"),
    ),
    "huge header": (HEAD + b"x-a: " + b"a" * 10**6 + b"\r\n\r\n", LARGE),
    "endless header": (HEAD + b"x-a: " + b"a" * 10**6, LARGE),
    "many headers": (HEAD + b"x-a: aaaaaaaaaaaaaaa\r\n" * 5000 + b"\r\n", LARGE),
    "many small headers": (HEAD + b"a:\r\n" * 200 + b"\r\n", LARGE),
    "long target": (b"GET /v1/files?" + b"a=1&" * 3000 + b" HTTP/1.1\r\n\r\n", LONG_TARGET),
    "trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n" + b"A: \r\n" * 10**6 + b"\r\n", LARGE),
    "endless trailer": (CHUNKED + b"2\r\n{}\r\n0\r\nA: " + b"a" * 10**6, LARGE),
    "chunk extension": (CHUNKED + b"2;" + b"a" * 10**6 + b"\r\n{}\r\n0\r\n\r\n", LARGE),
    "tiny chunks": (CHUNKED + b"1\r\n \r\n" * 10**6 + b"0\r\n\r\n", LARGE),
    "bad chunk": (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", BROKEN),
}


@pytest.mark.parametrize(("raw", "wanted"), RAW_REQUESTS.values(), ids=RAW_REQUESTS.keys())
async def test_broken_http_is_answered_and_closed(
    gateway: Gateway, raw: bytes, wanted: tuple[int, str]
) -> None:
    async with gateway.connect() as (reader, writer):
        writer.write(raw)
        head, body = await raw_answer(reader)

    assert head.startswith(b"HTTP/1.1 %d " % wanted[0])
    assert body["error"]["code"] == wanted[1] and body["error"]["message"]
    await assert_works(gateway)


async def raw_answer(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, Any]]:
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length")]
        content = await reader.readexactly(int(lengths[0].split(b":")[1]))
    body: dict[str, Any] = json.loads(content)
    return head, body


@pytest.mark.parametrize(
    ("settings", "raw", "code"),
    [
        ({"header_timeout": 0.05}, b"", "headers_timeout"),
        ({"header_timeout": 0.05}, HEAD, "headers_timeout"),
        ({"body_timeout": 0.05}, HEAD + b"content-length: 10\r\n\r\n{", "body_timeout"),
    ],
    ids=["silence", "half of the headers", "half of the body"],
)
async def test_slow_clients_are_dropped(
    checkpoint: Path, settings: dict[str, Any], raw: bytes, code: str
) -> None:
    async with serve(checkpoint, **settings) as gateway:
        async with gateway.connect() as (reader, writer):
            writer.write(raw)
            head, body = await raw_answer(reader)
        assert head.startswith(b"HTTP/1.1 408 ") and body["error"]["code"] == code
        await assert_works(gateway)


async def test_a_body_in_small_chunks_with_a_few_trailers_is_read(gateway: Gateway) -> None:
    body = json.dumps({"model": MODEL, "prompt": "one two", "max_tokens": 1}).encode()
    lines = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    async with gateway.connect() as (reader, writer):
        writer.write(CHUNKED + lines + b"0\r\ndigest: abc\r\n\r\n")
        head, _ = await raw_answer(reader)

    assert head.startswith(b"HTTP/1.1 200 ")


async def test_an_answered_request_whose_trailers_do_not_end_is_cut_off(gateway: Gateway) -> None:
    async with gateway.connect() as (reader, writer):
        writer.write(b"GET /version HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
        head, _ = await raw_answer(reader)
        writer.write(b"A: \r\n" * 10**5)
        async with asyncio.timeout(30):
            rest = await read_to_the_end(reader)

    assert head.startswith(b"HTTP/1.1 200 ") and rest == b""


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    with suppress(ConnectionError):  # data sent after the end is answered with a reset
        return await reader.read()
    return b""


async def test_requests_far_ahead_of_their_answers_are_cut_off(gateway: Gateway) -> None:
    async with asyncio.timeout(30), gateway.connect() as (reader, writer):
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * 10**5)
        answered = await read_to_the_end(reader)

    assert answered.count(b"HTTP/1.1 200 ") < 100
    await assert_works(gateway)


async def test_a_connection_is_reused_after_an_error(gateway: Gateway) -> None:
    request = HEAD + b"content-length: 2\r\n\r\n{}"
    async with gateway.connect() as (reader, writer):
        writer.write(request)
        first, _ = await raw_answer(reader)
        writer.write(request)
        second, _ = await raw_answer(reader)

    assert first.startswith(b"HTTP/1.1 400") and second.startswith(b"HTTP/1.1 400")


async def test_requests_sent_ahead_are_answered_in_their_order(gateway: Gateway) -> None:
    async with gateway.connect() as (reader, writer):
        writer.write(HEAD + b"content-length: 2\r\n\r\n{}")
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        answers = [(await raw_answer(reader))[1] for _ in range(3)]

    assert [next(iter(answer)) for answer in answers] == ["error", "object", "version"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_of_http_1_0_gets_a_body_that_the_close_ends(
    gateway: Gateway, stream: bool
) -> None:
    request_body = {"model": MODEL, "prompt": "one two", "max_tokens": 3, "stream": stream}
    body = json.dumps(request_body).encode()
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"connection: keep-alive\r\n"
    async with asyncio.timeout(60), gateway.connect() as (reader, writer):
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        answered, _, content = (await reader.read()).partition(b"\r\n\r\n")

    assert b" 200 " in answered and b"connection: close" in answered
    assert b"chunked" not in answered
    if stream:
        assert content.startswith(b"data: {") and content.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        assert json.loads(content)["choices"]


async def test_too_many_connections_get_retry_after(checkpoint: Path) -> None:
    async with serve(checkpoint, max_connections=1) as gateway, gateway.connect() as (_, writer):
        gateway.engine.gate.clear()
        body = json.dumps({"model": MODEL, "prompt": "one two", "max_tokens": 3}).encode()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await eventually(submitted(gateway))
        answer = await gateway.complete()
        gateway.engine.gate.set()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_connections")
        assert answer.headers["retry-after"] == "2"


def submitted(gateway: Gateway) -> Callable[[], Awaitable[bool]]:
    async def has_arrived() -> bool:
        return bool(gateway.engine.submitted)

    return has_arrived


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"GET /version HTTP/1.1\r\n", b"HTTP/1.1 503 "),
        (HEAD + b"content-length: 10\r\n\r\n{", b"HTTP/1.1 503 "),
    ],
    ids=["silence", "half of the headers", "half of the body"],
)
async def test_a_connection_without_a_complete_request_is_closed_for_a_new_one(
    checkpoint: Path, sent: bytes, answered: bytes
) -> None:
    async with serve(checkpoint, max_connections=2) as gateway, asyncio.timeout(30):
        async with gateway.connect() as (first, writer), gateway.connect() as (_, other):
            writer.write(sent)
            await assert_works(gateway)
            end = await read_to_the_end(first)
            other.write(b"GET /version HTTP/1.1\r\n\r\n")  # it is still there
            await assert_works(gateway)

    assert end.startswith(answered) and (end == b"") == (sent == b"")


async def test_the_most_recently_answered_connection_is_closed_last(checkpoint: Path) -> None:
    async with serve(checkpoint, max_connections=2) as gateway, asyncio.timeout(30):
        async with gateway.connect() as (first, writer), gateway.connect() as (second, _):
            for _ in range(2):
                writer.write(b"GET /version HTTP/1.1\r\n\r\n")
                await raw_answer(first)
                await assert_works(gateway)
            assert await read_to_the_end(second) == b""
