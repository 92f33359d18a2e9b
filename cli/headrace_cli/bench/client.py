"""A client for OpenAI servers that costs little, so that a benchmark measures the server.

It has one keep-alive connection for each request in flight, parses HTTP in C, and takes a time
stamp when data arrives. It retries nothing: failures are part of the measurement.
"""

import asyncio
import json
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

MAX_BODY_BYTES = 64 * 2**20


@dataclass(slots=True, kw_only=True)
class Timeline:
    """The tokens of one request and their times. Times in seconds of `time.perf_counter`.

    `gaps` are the times between pieces of output that brought tokens. `error` is a short kind such
    as `http 429`, None for success.
    """

    started: float
    ended: float = 0.0
    first_token: float | None = None
    last_token: float | None = None
    gaps: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int | None = None
    error: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The address of a server. `base` is the path before `/v1`, without a slash at its end."""

    host: str
    port: int
    tls: bool
    base: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str, headers: Mapping[str, str] | None = None) -> "Server":
        """Raises ValueError where `url` is not http(s)://host[:port][/path]."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: must be http(s)://host[:port], not {url!r}")
        tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if tls else 80),
            tls=tls,
            base=parts.path.rstrip("/").removesuffix("/v1"),
            headers=headers or {},
        )

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The whole HTTP/1.1 request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.base}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class RefusedError(ConnectionError):
    """An answer with a status other than 200."""

    def __init__(self, path: str, status: int) -> None:
        super().__init__(f"GET {path}: http {status}")
        self.status = status


class Client:
    """Connections to one server. `timeout` in seconds holds for each request as a whole."""

    def __init__(self, server: Server, *, timeout: float) -> None:
        self._server = server
        self._timeout = timeout
        self._idle: deque[_Connection] = deque()
        self._tls = ssl.create_default_context() if server.tls else None

    async def get(self, path: str) -> Any:
        """A JSON document. Raises OSError or TimeoutError, RefusedError for a bad status."""
        reader = _JsonReader()
        async with asyncio.timeout(self._timeout):
            await self._exchange(self._server.request("GET", path), reader)
        if reader.status != 200:
            raise RefusedError(path, reader.status)
        return json.loads(reader.body)

    async def generate(self, path: str, payload: Mapping[str, object]) -> Timeline:
        """Sends one completion request and reads its answer to the end. Raises nothing."""
        request = self._server.request("POST", path, json.dumps(payload).encode())
        reader = _JsonReader() if not payload.get("stream") else _StreamReader()
        timeline = reader.timeline = Timeline(started=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange(request, reader)
            reader.finish()
        except TimeoutError:
            timeline.error = "timeout"
        except ConnectionRefusedError:
            timeline.error = "connection refused"
        except (OSError, httptools.HttpParserError) as error:
            timeline.error, timeline.detail = "connection lost", str(error)
        except ValueError as error:
            timeline.error, timeline.detail = "not JSON", str(error)
        timeline.ended = time.perf_counter()
        return timeline

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def _exchange(self, request: bytes, reader: "_ResponseReader") -> None:
        connection = self._take_idle() or await self._connect()
        try:
            await connection.exchange(request, reader)
        # also on cancellation: the rest of the answer must not reach the next request
        except BaseException:
            connection.abort()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.abort()

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._server.host, self._server.port, ssl=self._tls
        )
        return connection


class _ResponseReader:
    """Parses one response. `status` is its HTTP status."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.timeline = Timeline(started=0.0)

    def feed(self, data: bytes, now: float) -> None:
        if len(self.body) + len(data) > MAX_BODY_BYTES:
            raise ConnectionError("the answer is too long")
        self.body += data

    def finish(self) -> None:
        """Completes the timeline once the response is complete."""
        if self.status != 200:
            self.timeline.error = f"http {self.status}"
            self.timeline.detail = bytes(self.body[:500]).decode(errors="replace")


class _JsonReader(_ResponseReader):
    def finish(self) -> None:
        super().finish()
        if self.timeline.error is None:
            _take_usage(self.timeline, json.loads(self.body).get("usage"))


class _StreamReader(_ResponseReader):
    """Server-sent events: each `data:` line is one whole event of the OpenAI API."""

    def __init__(self) -> None:
        super().__init__()
        self._rest = b""
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        if self.status != 200:
            super().feed(data, now)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def finish(self) -> None:
        super().finish()
        if self.timeline.error is None and not self._done:
            self.timeline.error = "truncated"

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        event = json.loads(data)
        if (error := event.get("error")) is not None:
            self.timeline.error = f"error {_error_code(error)}"
            self.timeline.detail = str(error)[:500]
            return
        tokens = sum(_tokens(choice) for choice in event.get("choices", ()))
        if tokens:
            self._stamp(tokens, now)
        _take_usage(self.timeline, event.get("usage"))

    def _stamp(self, tokens: int, now: float) -> None:
        timeline = self.timeline
        if timeline.last_token is None:
            timeline.first_token = now
        else:
            timeline.gaps.append(now - timeline.last_token)
        timeline.last_token = now
        timeline.output_tokens += tokens


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, one exchange at a time."""

    def __init__(self) -> None:
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._reader = _ResponseReader()
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0

    async def exchange(self, request: bytes, reader: _ResponseReader) -> None:
        assert self._transport is not None
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def abort(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ConnectionError, ValueError) as error:
            self._fail(ConnectionError(str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionError(str(exc) if exc else "closed by the server"))

    # Called by the parser.

    def on_headers_complete(self) -> None:
        self._reader.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._reader.feed(body, self._now)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: ConnectionError) -> None:
        self.reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


def _tokens(choice: dict[str, Any]) -> int:
    """The number of tokens in a piece of output: as counted by the server, or one if it has
    content."""
    token_ids = choice.get("token_ids")
    if token_ids is not None:
        return len(token_ids)
    delta = choice.get("delta")
    if delta is None:
        return 1 if choice.get("text") else 0
    return 1 if any(value for key, value in delta.items() if key != "role") else 0


def _take_usage(timeline: Timeline, usage: Mapping[str, int] | None) -> None:
    if usage is not None:
        timeline.prompt_tokens = usage.get("prompt_tokens")
        timeline.output_tokens = usage.get("completion_tokens", timeline.output_tokens)


def _error_code(error: object) -> str:
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "unknown")
    return "unknown"
