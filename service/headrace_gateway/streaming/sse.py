"""Server-sent events: one stream to one client.

A client that does not read for too long is disconnected, so that it occupies no memory and no
engine.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pydantic_core
from starlette.types import Scope, Send

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
# Milliseconds after which a client that lost a resumable stream reconnects; part of the next event.
RETRY = b"retry: 500\n"
DONE = b"data: [DONE]\n\n"
# Stands for a text. Its private-use characters occur nowhere else in an event.
_TEXT = "\ue000text\ue001"
# Keys of a request's state under which our server protocol offers to reset the connection, and to
# write to it.
ABORT = "headrace.abort"
CHANNEL = "headrace.channel"


class Channel(Protocol):
    """A shorter way than ASGI for pieces of a body, for the many writes of an open stream."""

    @property
    def ready(self) -> bool:
        """Whether a piece can be written now: the status is sent, and the client keeps up."""

    @property
    def has_reset(self) -> bool:
        """Whether the client has reset the connection."""

    @property
    def has_left(self) -> bool:
        """Whether the client has reset or closed the connection."""

    def write(self, content: bytes) -> None:
        """Writes one piece, not the last one. Only if `ready`."""


class Writer:
    """Sends ASGI messages; resets the connection if one takes longer than `timeout` seconds.

    One timer watches all writes of an answer: a timer for each would cost more than the write.
    """

    def __init__(self, scope: Scope, send: Send, timeout: float) -> None:
        self._send = send
        self._timeout = timeout
        state = scope.get("state", {})
        self._abort: Callable[[], None] | None = state.get(ABORT)
        self.channel: Channel | None = state.get(CHANNEL)
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
    """The events of one answer. Sends the status with the first event at the latest."""

    def __init__(self, writer: Writer, headers: Mapping[str, str]) -> None:
        self._writer = writer
        self._channel = writer.channel
        self._headers = {**HEADERS, **headers}
        self._lock = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()

    @property
    def opened(self) -> bool:
        return self._writer.started

    async def open(self, first: bytes = b"") -> None:
        await self._writer.start(200, self._headers)
        if first:
            await self._writer.body(first, more=True)

    @property
    def silent(self) -> float:
        """Seconds since something was sent."""
        return self._clock() - self._last

    @property
    def busy(self) -> bool:
        """Whether something is being sent."""
        return self._lock.locked()

    @property
    def ready(self) -> bool:
        """Whether `write` can be used."""
        channel = self._channel
        return channel is not None and channel.ready and not self._lock.locked()

    def write(self, content: bytes) -> None:
        """Sends without waiting. Only if `ready`."""
        assert self._channel is not None, "only where it is ready"
        self._last = self._clock()
        self._channel.write(content)

    async def send(self, content: bytes) -> None:
        """Sends the status if it is not sent yet, and the content, which may be empty."""
        async with self._lock:
            if not self.opened:
                await self.open()
            if content:
                self._last = self._clock()
                await self._writer.body(content, more=True)

    async def close(self, content: bytes = DONE) -> None:
        async with self._lock:
            if not self.opened:
                await self.open()
            await self._writer.body(content, more=False)


def encode(body: Mapping[str, Any] | str) -> bytes:
    return pydantic_core.to_json(body)


class TextEvent:
    """An event in which only one text changes. `make` gives the event's body for a text."""

    __slots__ = ("_after", "_before")

    def __init__(self, make: Callable[[str], Mapping[str, Any]]) -> None:
        self._before, _, self._after = event(make(_TEXT)).rpartition(encode(_TEXT))

    def __call__(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, pydantic_core.to_json(text), self._after)


def event(body: Mapping[str, Any], event_id: str | None = None, *, named: bool = False) -> bytes:
    """Returns one event. `named` adds a line with the event's name, which is the body's type."""
    prefix = b"" if event_id is None else f"id: {event_id}\n".encode()
    if named:
        prefix += f"event: {body['type']}\n".encode()
    return prefix + b"data: " + encode(body) + b"\n\n"
