"""uvicorn as this gateway runs it: without polling, and with limits on what clients may do.

uvicorn itself limits neither the size of headers nor the time a client takes to send them, and
wakes up ten times a second to see whether it should stop.
"""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..errors import ApiError, unavailable
from ..limits.budget import Budget
from ..limits.connections import ConnectionLimit, most_connections
from ..settings import GatewaySettings
from ..streaming.sse import ABORT, CHANNEL
from .body import refusal
from .peer import Peer

# Requests that may wait on one connection until its answer is sent.
MAX_PIPELINED = 16
MAX_PIPELINED_BYTES = 64 * 1024
BACKLOG = 2048
# The connections that one turn of the event loop accepts. libuv accepts one for each listening
# socket, so a client would wait a turn for each connection before its own.
ACCEPTED_A_TURN = 8
# Seconds for answers that a drain cuts short to reach their clients.
FAREWELL_SECONDS = 2.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_STATUS_LINES = {
    400: b"HTTP/1.1 400 Bad Request\r\n",
    408: b"HTTP/1.1 408 Request Timeout\r\n",
    431: b"HTTP/1.1 431 Request Header Fields Too Large\r\n",
    503: b"HTTP/1.1 503 Service Unavailable\r\n",
}
_BROKEN = ApiError(400, "Invalid HTTP request received.", code="invalid_http")
_LATE = ApiError(408, "The request's headers did not arrive in time.", code="headers_timeout")


class _Refused(Exception):
    """The connection is refused: no further input is read from it."""


class BodyChannel:
    """Writes pieces of one response's body as HTTP chunks, past the application's layers.

    The status, the headers and the last piece go through ASGI.
    """

    __slots__ = ("_cycle", "_descriptor", "_flow", "_peer", "_transport")

    def __init__(self, cycle: RequestResponseCycle, peer: Peer) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._peer = peer
        self._descriptor = peer.descriptor

    @property
    def ready(self) -> bool:
        cycle = self._cycle
        return (
            bool(cycle.chunked_encoding)  # known once the headers are written
            and not self._flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    @property
    def has_reset(self) -> bool:
        return bool(self._cycle.disconnected) or self._peer.has_reset

    @property
    def has_left(self) -> bool:
        return bool(self._cycle.disconnected) or self._peer.has_left

    def write(self, content: bytes) -> None:
        piece = b"%x\r\n%b\r\n" % (len(content), content)
        sent = self._sent(piece)
        if sent < len(piece):
            self._transport.write(piece[sent:])

    def _sent(self, piece: bytes) -> int:
        """Returns the bytes that the socket has taken at once.

        uvloop keeps what is written until the end of the loop's turn: the first of many streams
        would wait for the last.
        """
        transport = self._transport
        if self._descriptor is None or transport.is_closing() or transport.get_write_buffer_size():
            return 0
        try:
            return os.write(self._descriptor, piece)
        except OSError:
            return 0  # full or broken; the transport handles both cases


class GatewayProtocol(HttpToolsProtocol):
    """HTTP/1.1 with bounds on everything around a body. `header_timeout` in seconds.

    It continues to read while it answers, so that it notices when its client leaves. It also does
    so after a pipelined request, where uvicorn would stop reading.
    """

    header_timeout: float = 10.0
    budget: Budget = Budget()
    places: ConnectionLimit

    # Bytes of the current request outside of its body, and within it. The read in which it began is
    # not counted: no more of that is kept than `budget` allows.
    _overhead = 0
    _body_bytes = 0
    _begun = False
    _in_headers = False
    _header_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None
    _peer: Peer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._peer = Peer(transport)
        if self._peer.has_reset:  # while it waited to be accepted
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        if self.places.take(self):
            self._await_headers()
        else:
            transport.abort()

    def give_way(self) -> None:
        """Closes to make room for a new connection. A partly received request is answered."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self._overhead or self._begun:
            self._refuse(_crowded())
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.places.leave(self)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._begun = False
        body_before = self._body_bytes
        super().data_received(data)
        if not self._begun:
            self._overhead += len(data) - (self._body_bytes - body_before)
        self._check_overhead()
        if self.pipeline:
            self._read_on()

    def on_message_begin(self) -> None:
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
            raise _Refused
        super().on_message_begin()
        self._begun = True
        self._overhead = self._body_bytes = 0
        self.scope["state"][ABORT] = self.transport.abort
        self._await_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            return  # a trailer, which is ignored
        super().on_header(name, value)
        if len(self.headers) > self.budget.headers:
            self._refuse(self._too_large())
            raise _Refused

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.places.busy(self)
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_timer()
        self.app = self._app_for_request()
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["state"][CHANNEL] = BodyChannel(self.cycle, self._peer)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = UntilClosed(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        elif not self.transport.is_closing():
            self.places.idle(self)
        super().on_response_complete()

    def _read_on(self) -> None:
        """Continues to read, up to a bound, while a pipelined request waits for the previous
        answer."""
        held = self._overhead + sum(len(cycle.body) for cycle, _ in self.pipeline)
        if len(self.pipeline) > MAX_PIPELINED or held > MAX_PIPELINED_BYTES:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.flow.resume_reading()

    def _app_for_request(self) -> Any:
        if len(self.url) > self.budget.target_bytes:
            return refusal(self._too_long())
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.budget.head_bytes:
            return refusal(self._too_large())
        if self.places.crowded:
            return refusal(_crowded())
        return self.config.loaded_app

    def _check_overhead(self) -> None:
        if self._in_headers:
            most = self.budget.head_bytes
        else:
            most = self.budget.most_overhead(self._body_bytes)
        if self._overhead > most:
            self._refuse(self._too_large())

    def _too_large(self) -> ApiError:
        budget = self.budget
        return ApiError(
            431,
            f"The request has over {budget.head_bytes} bytes of headers, over {budget.headers} of "
            f"them, or over {budget.framing_bytes} bytes of trailers and of chunks' lines. Send "
            "fewer headers, no trailers, and the body with a Content-Length.",
            code="headers_too_large",
        )

    def _too_long(self) -> ApiError:
        most = self.budget.target_bytes
        return ApiError(
            414, f"The request's path and query are over {most} bytes.", code="target_too_long"
        )

    def send_400_response(self, msg: str) -> None:
        self._refuse(_BROKEN)

    def _is_answering(self) -> bool:
        """Whether a request that was read has no complete answer yet."""
        cycle = self._answering
        if cycle is None or cycle.response_complete:
            return False
        return cycle.response_started or not cycle.more_body

    def _has_answered(self) -> bool:
        """Whether the request that is being read already has its complete answer."""
        return not self._in_headers and self.cycle is not None and self.cycle.response_complete

    def _await_headers(self) -> None:
        if self._in_headers:
            return
        self._in_headers = True
        self._header_timer = self.loop.call_later(self.header_timeout, self._too_slow)

    def _too_slow(self) -> None:
        if self._in_headers and not self.transport.is_closing():
            self._refuse(_LATE)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering() or self._has_answered():
            self.transport.close()  # no message can be sent within an answer, or after it
            return
        body = json.dumps(error.body).encode()
        self.transport.write(
            _STATUS_LINES[error.status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"".join(b"%b: %b\r\n" % _encoded(pair) for pair in error.headers.items())
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()


def _crowded() -> ApiError:
    return unavailable("Too many open connections; try again.", code="too_many_connections")


def _encoded(header: tuple[str, str]) -> tuple[bytes, bytes]:
    name, value = header
    return name.encode(), value.encode()


class UntilClosed:
    """Wraps an application for a client of HTTP/1.0, which knows no chunks.

    A body of unknown length is sent unchanged, and ends with the connection.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._measured = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(message: Message) -> None:
            self._prepare(message)
            await send(message)

        await self._app(scope, receive, put)

    def _prepare(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._measured = b"content-length" in names
            if not self._measured:
                self._cycle.chunked_encoding = False
        elif not self._measured:
            self._cycle.expected_content_length = len(message.get("body", b""))


class GatewayServer(uvicorn.Server):
    """Stops on SIGINT and SIGTERM, after calling `on_drain`. A second signal stops it at once.

    `on_ready` is called when requests are taken and signals are handled.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_drain: Callable[[], None],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._on_drain = on_drain
        self._on_ready = on_ready
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Accepts nothing more and lets running requests end; a second call ends them."""
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        self._on_drain()
        self._stopping.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        given = sockets or []
        # Their servers close them.
        further = [each.dup() for each in given for _ in range(ACCEPTED_A_TURN - 1)]
        await super().startup([*given, *further])
        self._on_ready()

    async def main_loop(self) -> None:
        await self._stopping.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals through the event loop, which sleeps until something happens."""
        loop = asyncio.get_running_loop()
        try:
            for number in SIGNALS:
                loop.add_signal_handler(number, self.stop)
        except (ValueError, RuntimeError):  # not the main thread: signals are handled elsewhere
            yield
            return
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


def server_config(app: ASGIApp, settings: GatewaySettings) -> uvicorn.Config:
    protocol = type(
        "Protocol",
        (GatewayProtocol,),
        {
            "header_timeout": settings.header_timeout,
            "places": ConnectionLimit(most_connections(settings.max_connections)),
        },
    )
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        date_header=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(settings.drain_timeout + FAREWELL_SECONDS) + 1,
    )


def listen(settings: GatewaySettings) -> socket.socket:
    """Returns the API's listening socket: the parent's, or one of our own. Raises OSError."""
    listener = _bind(settings) if settings.fd is None else socket.socket(fileno=settings.fd)
    # Accepted sockets inherit it. Without it each answer would wait for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _bind(settings: GatewaySettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
