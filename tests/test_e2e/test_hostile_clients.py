"""Connections that are slow, never read, broken or too many; and malformed bytes in Redis.

After each attack the same engine serves, and no sequence, block or queue entry is left.
"""

import asyncio
import json
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from redis import Redis

from headrace_common.wire import keys
from headrace_common.wire.keys import ShardKeys, new_request_id
from headrace_common.wire.messages import MAX_MESSAGE_BYTES
from headrace_testing.gateway import connected
from headrace_testing.processes import until
from headrace_testing.single import LONG, MAX_CONNECTIONS, SingleStack
from headrace_testing.stack import MODEL

KEYS = ShardKeys(MODEL)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CROWD = 1000


@pytest.fixture(autouse=True)
def _stays_healthy(single: SingleStack) -> Iterator[None]:
    yield
    assert single.engine.alive and single.gateway.alive
    single.until_clean()
    assert single.complete().status_code == 200


@pytest.fixture
def redis(single: SingleStack) -> Iterator[Redis]:
    with Redis.from_url(single.valkey.url) as client:
        yield client


def request(*, head: bytes = HEAD, **fields: object) -> bytes:
    """The bytes of a request for a long streamed completion."""
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": LONG, "ignore_eos": True}
    content = json.dumps({**body, "stream": True, **fields}).encode()
    return head + b"Content-Length: %d\r\n\r\n" % len(content) + content


def answer(connection: socket.socket) -> tuple[int, dict[str, str]]:
    """The status and error object that the server sends before it closes the connection."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    error: dict[str, str] = json.loads(body)["error"]
    return int(head.split()[1]), error


def reset(connection: socket.socket) -> None:
    """Ends a connection with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# Slow and broken HTTP


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"Content-Length: 12a\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: -1\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"Connection: close\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 20_000, 431),
    ],
)
def test_broken_http_is_refused(single: SingleStack, sent: bytes, status: int) -> None:
    with single.connect() as connection:
        connection.sendall(sent)
        received, error = answer(connection)
    assert received == status
    assert error["type"] == "invalid_request_error" and error["message"]


def test_slow_requests_are_refused(single: SingleStack) -> None:
    with single.connect() as header, single.connect() as body:
        header.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        body.sendall(HEAD + b'Content-Length: 1000\r\n\r\n{"model": ')
        assert single.complete().status_code == 200
        assert [answer(header)[0], answer(body)[0]] == [408, 408]


def test_chunks_beyond_the_limit_are_cut_off(single: SingleStack) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with single.connect() as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for _ in range(140):
            connection.sendall(chunk)
        connection.sendall(b"0\r\n\r\n")
        status, error = answer(connection)
    assert (status, error["code"]) == (413, "request_too_large")


def test_idle_connections_are_closed_when_new_ones_come(single: SingleStack) -> None:
    idle = [single.connect() for _ in range(MAX_CONNECTIONS)]
    assert single.complete().status_code == 200
    closed, *others = idle
    with closed:
        assert closed.recv(1) == b""
    for connection in others:
        with connection:
            assert answer(connection)[0] == 408


# Clients that disconnect


def slow_readers(single: SingleStack) -> int:
    """The number of requests that ended because the client did not read its answer."""
    ended = [entry.get("error_type") for entry in single.gateway.log_entries()]
    return ended.count("slow_reader")


@contextmanager
def unread(single: SingleStack, sent: bytes) -> Iterator[bytes]:
    """Sends a request, reads only the first bytes of the answer, and waits until the request is
    dropped."""
    before = slow_readers(single)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", single.gateway.port))
        connection.sendall(sent)
        yield connection.recv(1024)
        until(lambda: slow_readers(single) > before, "a client that does not read to be dropped")


# More than all socket buffers on the way can hold.
MUCH: dict[str, Any] = {"n": 32, "logprobs": 20, "max_tokens": LONG // 16}


def test_a_client_that_never_reads_is_dropped(single: SingleStack) -> None:
    with unread(single, request(**MUCH)):
        assert single.complete().status_code == 200


def test_a_resumable_client_that_never_reads_is_dropped_and_finds_its_stream_again(
    single: SingleStack,
) -> None:
    with unread(single, request(head=HEAD + b"x-resumable: true\r\n", **MUCH)) as head:
        (location,) = re.findall(rb"content-location: (\S+)", head.lower())
    made = [0] * 32
    url = f"{single.gateway.url}{location.decode()}/events"
    with httpx.stream("GET", url, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    made[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert made == [MUCH["max_tokens"]] * 32


def test_a_client_that_resets_its_stream_is_dropped(single: SingleStack) -> None:
    before = single.output_tokens()
    connection = single.connect()
    connection.sendall(request())
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    reset(connection)
    single.until_clean()
    assert single.output_tokens() - before < LONG / 2


def test_many_clients_that_disconnect_at_once_leave_nothing_open(
    single: SingleStack, redis: Redis
) -> None:
    answered: list[int] = []

    async def visit(number: int) -> None:
        """Disconnects before the answer, at its beginning, or after its first event, if there is
        one."""
        async with connected(single.gateway.port) as (reader, writer):
            writer.write(request(n=1 + number % 2, max_tokens=LONG // 6))
            await writer.drain()
            if number % 4:
                with suppress(asyncio.IncompleteReadError):  # refused on a machine this busy
                    await reader.readuntil(b"\r\n\r\n" if number % 4 < 3 else b"data: ")
                    answered.append(number)
            if number % 3:
                writer.transport.abort()

    async def crowd() -> None:
        await asyncio.gather(*map(visit, range(CROWD)))

    before = single.output_tokens()
    asyncio.run(crowd())
    assert len(answered) > CROWD / 2, "too few clients disconnected in the middle of an answer"
    single.until_clean()
    assert single.output_tokens() - before < CROWD * LONG / 12
    assert [redis.xlen(queue) for queue in KEYS.queues] == [0, 0, 0]
    for prefix in (KEYS.payloads, KEYS.journals):
        assert list(redis.scan_iter(f"{prefix}*", 10_000)) == []


# Malformed bytes in Redis


def payloads() -> Sequence[bytes]:
    pickle = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94."
    return [
        b"",
        b"\xc1",
        b"not msgpack",
        pickle,
        b"\xc7\x04\x01abcd",  # an extension type
        b"\xc6\xff\xff\xff\xff",  # claims 4 GiB of bytes
        b"\xdd\xff\xff\xff\xff",  # claims four billion items
        b"\x91" * 100_000,
        b"\x81\xa1v\x01",
        b"\x00" * (MAX_MESSAGE_BYTES + 1),
    ]


def test_malformed_payloads_become_dead_letters(single: SingleStack, redis: Redis) -> None:
    known = redis.xlen(KEYS.dead_letters)
    ids = [new_request_id() for _ in payloads()]
    for number, (request_id, payload) in enumerate(zip(ids, payloads(), strict=True)):
        queue_raw(redis, number, request_id, payload)
    redis.xadd(KEYS.queue("n"), {"x": "y"})
    redis.xadd(KEYS.queue("n"), {"r": b"\xff\xfe\x00"})
    redis.xadd(KEYS.queue("n"), {"r": "0.nobody", "v": "x" * 100_000})
    until(
        lambda: redis.xlen(KEYS.dead_letters) == known + len(ids) + 3,
        "every malformed message to be a dead letter",
    )
    letters: Any = redis.xrevrange(KEYS.dead_letters, count=len(ids) + 3)
    assert {fields[b"r"].decode(errors="replace") for _, fields in letters} >= set(ids)
    assert all(redis.hget(KEYS.record(request_id), "st") == b"failed" for request_id in ids)


def queue_raw(redis: Redis, number: int, request_id: str, payload: bytes) -> None:
    """Writes a request as ADMIT does, its stream entry last, but with any bytes as payload."""
    seconds, microseconds = redis.time()
    entry = f"{seconds * 1000 + microseconds // 1000}-{number}"
    record: Any = {
        **{"st": "queued", "q": 2, "mid": entry, "a": 0, "o": "", "g": "nobody", "gs": "", "f": 0},
        **{"pn": 0, "pt": 0, "d": 2**52, "tk": 1, "pk": 1, "v": 1, "fp": "x"},
    }
    redis.set(KEYS.payload(request_id), payload, ex=60)
    redis.hset(KEYS.record(request_id), mapping=record)
    redis.expire(KEYS.record(request_id), 60)
    redis.xadd(KEYS.queue("n"), {"r": request_id, "v": 1}, id=entry)


@pytest.mark.parametrize(
    "garbage", [b"\xc1", b"\x80\x04.", b"\xc6\xff\xff\xff\xff", b"\x91" * 5000]
)
def test_malformed_frames_and_controls_are_skipped(
    single: SingleStack, redis: Redis, garbage: bytes
) -> None:
    streams = [(stream, "f") for stream in redis.scan_iter("o:*")]
    streams += [
        (keys.controls(status.engine_id, status.model), "c") for status in single.engine_status()
    ]
    assert len(streams) >= 2
    for stream, field in streams:
        redis.xadd(stream, {field: garbage})
        redis.xadd(stream, {"x": "y"})
