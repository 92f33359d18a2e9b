"""Server-sent events: one stream to one client, with comments while there is nothing to say.

A client that does not read for too long is cut off, so that it holds neither memory nor an engine.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pydantic_core
from starlette.types import Scope, Send

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
# Where in a request's state our server protocol offers to reset the connection.
ABORT = "headrace.abort"


class Writer:
    """Sends ASGI messages; resets the connection where one takes longer than `timeout` seconds.

    One timer watches all writes of an answer, since one for each would cost more than the write.
    """

    def __init__(self, scope: Scope, send: Send, timeout: float) -> None:
        self._send = send
        self._timeout = timeout
        self._abort: Callable[[], None] | None = scope.get("state", {}).get(ABORT)
        self._loop = asyncio.get_running_loop()
        self._writing_since: float | None = None
        self._timer = self._loop.call_later(timeout, self._check)
        self.started = False
        self.ended = False
        self.slow_reader = False

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def body(self, content: bytes, *, more: bool) -> None:
        await self._put({"type": "http.response.body", "body": content, "more_body": more})
        self.ended = not more

    async def whole(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        length = {"content-length": str(len(content)), "content-type": "application/json"}
        await self.start(status, {**headers, **length})
        await self.body(content, more=False)

    def close(self) -> None:
        self._timer.cancel()

    async def _put(self, message: dict[str, Any]) -> None:
        self._writing_since = self._loop.time()
        await self._send(message)
        self._writing_since = None

    def _check(self) -> None:
        now = self._loop.time()
        since = now if self._writing_since is None else self._writing_since
        if now - since < self._timeout:
            self._timer = self._loop.call_at(since + self._timeout, self._check)
            return
        self.slow_reader = True
        if self._abort is not None:
            self._abort()


class EventStream:
    """The events of one answer. `keep_alive` in seconds."""

    def __init__(self, writer: Writer, *, keep_alive: float) -> None:
        self._writer = writer
        self._interval = keep_alive
        self._lock = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()

    async def open(self, headers: Mapping[str, str]) -> None:
        await self._writer.start(200, {**HEADERS, **headers})

    async def send(self, content: bytes) -> None:
        async with self._lock:
            self._last = self._clock()
            await self._writer.body(content, more=True)

    async def close(self, content: bytes = DONE) -> None:
        async with self._lock:
            await self._writer.body(content, more=False)

    async def keep_alive(self) -> None:
        """Runs beside the answer; wakes up only when a comment may be due."""
        while True:
            silent = self._clock() - self._last
            if silent >= self._interval:
                await self.send(KEEP_ALIVE)
                silent = 0.0
            await asyncio.sleep(self._interval - silent)


def encode(body: Mapping[str, Any]) -> bytes:
    return pydantic_core.to_json(body)


def event(body: Mapping[str, Any], event_id: str | None = None) -> bytes:
    prefix = b"" if event_id is None else f"id: {event_id}\n".encode()
    return prefix + b"data: " + encode(body) + b"\n\n"
