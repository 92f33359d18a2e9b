"""A small HTTP/1.0 server on a thread of its own, bounded in time, memory and file descriptors.

The thread runs an event loop: it accepts, reads heads of requests and writes answers, and never
waits for a client. An answer that may take long is made by a thread of a lane; each lane has a
number of them. Clients that send or read slowly lose their connections: after a time, or at once
where another client needs the place.
"""

import asyncio
import errno
import gzip
import http.client
import io
import logging
import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 8192
HEAD_TIMEOUT_S = 2.0
"""From the connection to the last byte of the request's head."""
ANSWER_TIMEOUT_S = 10.0
"""From the head to the last byte of the answer, without the time that `unbounded` work takes."""
BACKLOG = 128

# Connections that can be served at once while the process has no other file descriptor left.
_RESERVED_DESCRIPTORS = 8
_ACCEPTED_AT_ONCE = 8
_ACCEPT_PAUSE_S = 0.05
_SMALLEST_COMPRESSED = 1024
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for. Header names are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    status: HTTPStatus
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Lane:
    """Runs work on threads of its own, at most `places` at a time.

    `unbounded` work takes as long as it takes; other work is given up after ANSWER_TIMEOUT_S.
    """

    def __init__(self, name: str, places: int, *, unbounded: bool = False) -> None:
        self.name, self.unbounded = name, unbounded
        self._places = threading.BoundedSemaphore(places)

    def start(self, work: Callable[[], None]) -> bool:
        """False where there is no place, or the process may have no more threads."""
        if not self._places.acquire(blocking=False):
            return False
        try:
            threading.Thread(target=self._run, args=(work,), name=self.name, daemon=True).start()
        except RuntimeError:
            self._places.release()
            return False
        return True

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._places.release()


@dataclass(frozen=True, slots=True)
class Job:
    """An answer that is made on a thread of `lane`."""

    lane: Lane
    make: Callable[[], Answer]


Route = Callable[[Request], Answer | Job]
"""Runs on the port's only thread, so it must not block."""


class HttpPort:
    """Answers on `listener`, which it owns from then on, until closed."""

    def __init__(self, listener: socket.socket, route: Route, *, name: str) -> None:
        listener.setblocking(False)
        self._listener, self._route = listener, route
        self._connections: dict[_Connection, None] = {}  # the oldest first
        self._opening: set[asyncio.Task[object]] = set()
        self._reserve: list[int] = []
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(_log_failure)
        self._loop.add_reader(listener, self._accept)
        self._refill()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering and frees the port. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in tuple(self._connections):
            connection.drop()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next turn
        while self._reserve:
            os.close(self._reserve.pop())

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    return self._free_a_descriptor()
                continue  # the client is gone already
            if len(self._connections) >= MAX_CONNECTIONS:
                self._evict()
            self._open(accepted)

    def _open(self, accepted: socket.socket) -> None:
        connection = _Connection(self._loop, self._route, self._forget)
        self._connections[connection] = None
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: connection, accepted)
        )
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    def _free_a_descriptor(self) -> None:
        """The listener stays readable, so the loop accepts again in its next turn."""
        if self._reserve:
            os.close(self._reserve.pop())
        elif not self._evict():
            self._loop.remove_reader(self._listener)
            self._loop.call_later(
                _ACCEPT_PAUSE_S, self._loop.add_reader, self._listener, self._accept
            )

    def _evict(self) -> bool:
        """Drops the connection that has sent an incomplete head for the longest time; where there
        is none, the one that has been reading its answer for the longest time."""
        for state in ("head", "answer"):
            for connection in self._connections:
                if connection.state == state:
                    connection.drop()
                    return True
        return False

    def _forget(self, connection: "_Connection") -> None:
        self._connections.pop(connection, None)
        self._loop.call_soon(self._refill)  # its socket is closed after this callback

    def _refill(self) -> None:
        try:
            while len(self._reserve) < _RESERVED_DESCRIPTORS and not self._loop.is_closed():
                self._reserve.append(os.dup(self._listener.fileno()))
        except OSError:
            pass  # closed, or there is no descriptor to spare; tried again after each connection


class _Connection(asyncio.Protocol):
    """One exchange: its head is read, its answer made and written, its connection closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        route: Route,
        forget: Callable[["_Connection"], None],
    ) -> None:
        self.state: Literal["opening", "head", "work", "answer", "dropped"] = "opening"
        self._loop, self._route, self._forget = loop, route, forget
        self._head = bytearray()
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._compress = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.state = transport, "head"
        self._expire_after(HEAD_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        if self.state != "head":
            return
        self._head += data
        end = _END_OF_HEAD.search(self._head, max(0, len(self._head) - len(data) - 3))
        if (end.end() if end else len(self._head)) > MAX_HEAD_BYTES:
            self._write(Answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        elif end:
            self._asked(bytes(self._head[: end.end()]))

    def eof_received(self) -> bool:
        return self.state != "head"  # a client that has sent all may still read

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._forget(self)

    def drop(self) -> None:
        self.state = "dropped"
        self._transport.abort()

    def _asked(self, head: bytes) -> None:
        self._transport.pause_reading()  # bodies are never read
        self._expire_after(ANSWER_TIMEOUT_S)
        self.state = "work"
        try:
            request = _parse(head)
        except (ValueError, http.client.HTTPException):
            return self._write(Answer(HTTPStatus.BAD_REQUEST))
        self._compress = "gzip" in request.headers.get("accept-encoding", "")
        made = _safely(lambda: self._route(request))
        if isinstance(made, Answer):
            return self._write(made)
        if made.lane.unbounded:
            self._stop_timer()
        if not made.lane.start(lambda: self._work(made)):
            self._write(_busy())

    def _work(self, job: Job) -> None:
        """Runs on a thread of the lane."""
        made = _safely(job.make)
        assert isinstance(made, Answer)
        answer = _compressed(made) if self._compress else made
        try:
            self._loop.call_soon_threadsafe(self._write, answer)
        except RuntimeError:
            _log.debug("the port was closed before its answer was made")

    def _write(self, answer: Answer) -> None:
        if self._transport.is_closing():
            return
        if self._timer is None:
            self._expire_after(ANSWER_TIMEOUT_S)
        self.state = "answer"
        self._transport.write(_packed(answer))
        self._transport.close()  # after the last byte

    def _expire_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self.drop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _parse(head: bytes) -> Request:
    """Raises ValueError or HTTPException for what is no request."""
    first, _, fields = head.lstrip(b"\r\n").partition(b"\n")
    method, target, version = first.decode("ascii").split()
    if not version.startswith("HTTP/1."):
        raise ValueError(f"not HTTP/1: {version}")
    headers = http.client.parse_headers(io.BytesIO(fields))
    path, _, query = target.partition("?")
    return Request(method, path, query, {name.lower(): value for name, value in headers.items()})


def _safely(make: Callable[[], Answer | Job]) -> Answer | Job:
    try:
        return make()
    except Exception:  # noqa: BLE001 - the thread's edge; the port goes on
        _log.exception("a page of the metrics port failed")
        return Answer(HTTPStatus.INTERNAL_SERVER_ERROR)


def _busy() -> Answer:
    text = {"Content-Type": "text/plain; charset=utf-8", "Retry-After": "1"}
    return Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"too many of these at once; retry\n", text)


def _compressed(answer: Answer) -> Answer:
    if len(answer.body) < _SMALLEST_COMPRESSED:
        return answer
    headers = {**answer.headers, "Content-Encoding": "gzip"}
    return Answer(answer.status, gzip.compress(answer.body, compresslevel=1), headers)


def _packed(answer: Answer) -> bytes:
    fields = {**answer.headers, "Content-Length": str(len(answer.body)), "Connection": "close"}
    lines = [f"HTTP/1.0 {answer.status.value} {answer.status.phrase}"]
    lines += (f"{name}: {value}" for name, value in fields.items())
    return "\r\n".join((*lines, "", "")).encode("latin-1") + answer.body


def _log_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """A client that breaks its connection is no news."""
    _log.debug("metrics client failed", extra={"reason": str(context.get("message"))})
