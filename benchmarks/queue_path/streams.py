"""Clients that read event streams as raw bytes, so that they cost little beside the gateway.

Every read is timed, with the tokens that it completes: each is a letter of its event's text.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_TEXT = re.compile(rb'"(?:text|content)":"(a+)"')
_END = b"data: [DONE]\n\n"
_ID = re.compile(rb'"id":"(?:cmpl|chatcmpl)-([^"]+)"')


@dataclass(slots=True)
class Stream:
    """What one client got. Times in monotonic ns; `arrivals[i]` is of its token number i."""

    sent: int = 0
    status: int = 0
    request_id: str = ""
    arrivals: list[int] = field(default_factory=list)
    reads: int = 0
    events: int = 0
    complete: bool = False


class Started:
    """Calls `then` when so many streams have got their first event."""

    def __init__(self, streams: int, then: Callable[[], None]) -> None:
        self._left = streams
        self._then = then

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then()


class _Reader(asyncio.Protocol):
    def __init__(
        self,
        stream: Stream,
        done: "asyncio.Future[None]",
        request: bytes,
        started: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._started = started
        self._done = done
        self._request = request
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._stream.sent = time.monotonic_ns()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        stream = self._stream
        stream.reads += 1
        if not stream.status:
            stream.status = int(data.split(b" ", 2)[1])
        if not stream.request_id and (found := _ID.search(data)):
            stream.request_id = found[1].decode()
        events, end, self._tail = (self._tail + data).rpartition(b"\n\n")
        tokens = sum(map(len, _TEXT.findall(events)))
        if tokens and not stream.arrivals:
            self._started()
        stream.arrivals += [now] * tokens
        stream.events += events.count(b"data: {")
        if _END in events + end:
            stream.complete = True
            self._finish()

    def connection_lost(self, _error: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def read_stream(
    url: str, path: str, body: dict[str, Any], started: Callable[[], None] = lambda: None
) -> Stream:
    """One request on a connection of its own, read to its end."""
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    request = (
        f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    ).encode() + content
    stream = Stream()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    transport, _ = await loop.create_connection(
        lambda: _Reader(stream, done, request, started), str(parts.hostname), parts.port or 80
    )
    await done
    transport.close()
    return stream


async def read_streams(
    url: str,
    path: str,
    bodies: Sequence[dict[str, Any]],
    concurrency: int,
    started: Callable[[], None] = lambda: None,
) -> list[Stream]:
    """All of them, so many at a time. `started` is called at each one's first event."""
    left = iter(bodies)
    done: list[Stream] = []

    async def client() -> None:
        for body in left:
            done.append(await read_stream(url, path, body, started))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return done
