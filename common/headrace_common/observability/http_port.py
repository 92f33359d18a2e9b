"""A small HTTP/1.0 server on a thread of its own, bounded in time, memory and file descriptors.

The thread runs an event loop: it accepts connections, reads heads of requests and writes responses,
and never waits for a client. A slow response is made on another thread; a ThreadLimit bounds their
number. A client that sends or reads slowly loses its connection after a time, or immediately if
another client needs it.
"""

import asyncio
import errno
import gzip
import http.client
import io
import logging
import os
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
RESPONSE_TIMEOUT_S = 10.0
"""From the head to the last byte of the answer, without the time that `unbounded` work takes."""
BACKLOG = 128

# Connections that can be served at once while the process has no other file descriptor left.
_RESERVED_DESCRIPTORS = 8
_ACCEPTED_AT_ONCE = 8
_ACCEPT_PAUSE_S = 0.05
_SMALLEST_COMPRESSED = 1024
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The head of a client's request. Header names are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: HTTPStatus
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class ThreadLimit:
    """Runs work on threads of its own, at most `max_threads` at a time.

    `unbounded` work has no time limit; other work is given up after RESPONSE_TIMEOUT_S.
    """

    def __init__(self, name: str, max_threads: int, *, unbounded: bool = False) -> None:
        self.name, self.unbounded = name, unbounded
        self._free_threads = threading.BoundedSemaphore(max_threads)

    def start(self, work: Callable[[], None]) -> bool:
        """Starts work on a thread; False if all are in use or the process may have no more."""
        if not self._free_threads.acquire(blocking=False):
            return False
        try:
            threading.Thread(target=self._run, args=(work,), name=self.name, daemon=True).start()
        except RuntimeError:
            self._free_threads.release()
            return False
        return True

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._free_threads.release()


@dataclass(frozen=True, slots=True)
class DeferredResponse:
    """A response that is made on one of `threads`."""

    threads: ThreadLimit
    make: Callable[[], HttpResponse]


Route = Callable[[HttpRequest], HttpResponse | DeferredResponse]
"""Runs on the port's only thread, so it must not block."""


class HttpPort:
    """Serves HTTP on `listener`, which it owns, until closed."""

    def __init__(self, listener: socket.socket, route: Route, *, name: str) -> None:
        listener.setblocking(False)
        self._listener, self._route = listener, route
        self._exchanges: dict[asyncio.Task[None], _Exchange] = {}  # the oldest first
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
        exchanges = list(self._exchanges)
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)
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
            if len(self._exchanges) >= MAX_CONNECTIONS:
                self._evict()
            exchange = _Exchange(self._route)
            task = self._loop.create_task(exchange.run(accepted))
            self._exchanges[task] = exchange
            task.add_done_callback(self._forget)

    def _free_a_descriptor(self) -> None:
        """Frees a file descriptor; the listener stays readable, so the loop accepts again."""
        if self._reserve:
            os.close(self._reserve.pop())
        elif not self._evict():
            self._loop.remove_reader(self._listener)
            self._loop.call_later(
                _ACCEPT_PAUSE_S, self._loop.add_reader, self._listener, self._accept
            )

    def _evict(self) -> bool:
        """Drops the connection whose head has been incomplete longest.

        If there is none, drops the one that has been reading its response longest.
        """
        for state in ("head", "answer"):
            for exchange in self._exchanges.values():
                if exchange.state == state:
                    exchange.drop()
                    return True
        return False

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._exchanges[task]
        self._loop.call_soon(self._refill)  # its socket is closed after this callback

    def _refill(self) -> None:
        try:
            while len(self._reserve) < _RESERVED_DESCRIPTORS and not self._loop.is_closed():
                self._reserve.append(os.dup(self._listener.fileno()))
        except OSError:
            pass  # closed, or there is no descriptor to spare; tried again after each connection


class _Exchange:
    """One request and its response on one connection."""

    def __init__(self, route: Route) -> None:
        self.state: Literal["opening", "head", "work", "answer", "dropped"] = "opening"
        self._route = route
        self._writer: asyncio.StreamWriter

    def drop(self) -> None:
        """Closes the connection without the rest of the response."""
        self.state = "dropped"
        self._writer.transport.abort()

    async def run(self, accepted: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=accepted, limit=MAX_HEAD_BYTES)
        self.state = "head"
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S) as limit:
                answer = await self._answer(reader, limit)
                self.state = "answer"
                self._writer.write(_packed(answer))
                self._writer.close()  # after the last byte
                await self._writer.wait_closed()
        except (TimeoutError, EOFError, OSError) as error:
            _log.debug("metrics client failed", extra={"reason": str(error)})
        finally:
            self._writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, limit: asyncio.Timeout) -> HttpResponse:
        loop = asyncio.get_running_loop()
        try:
            head = await _read_head(reader)
            limit.reschedule(loop.time() + RESPONSE_TIMEOUT_S)
            self.state = "work"
            request = _parse(head)
        except asyncio.LimitOverrunError:
            return HttpResponse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except (ValueError, http.client.HTTPException):
            return HttpResponse(HTTPStatus.BAD_REQUEST)
        made = _safely(lambda: self._route(request))
        if isinstance(made, HttpResponse):
            return made
        if made.threads.unbounded:
            limit.reschedule(None)
        answer = await _made(made, "gzip" in request.headers.get("accept-encoding", ""))
        if made.threads.unbounded:
            limit.reschedule(loop.time() + RESPONSE_TIMEOUT_S)
        return answer


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """Reads until an empty line. Raises LimitOverrunError, or EOFError if the client leaves."""
    head = bytearray()
    while not head.endswith((b"\n\n", b"\n\r\n")):
        head += await reader.readuntil(b"\n")
        if len(head) > MAX_HEAD_BYTES:
            raise asyncio.LimitOverrunError("the head is too large", len(head))
    return bytes(head)


async def _made(job: DeferredResponse, compress: bool) -> HttpResponse:
    """Makes the response on another thread."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[HttpResponse] = loop.create_future()

    def settle(answer: HttpResponse) -> None:
        if not made.done():
            made.set_result(answer)

    def work() -> None:
        answer = _safely(job.make)
        assert isinstance(answer, HttpResponse)
        try:
            loop.call_soon_threadsafe(settle, _compressed(answer) if compress else answer)
        except RuntimeError:
            _log.debug("the port was closed before its answer was made")

    return await made if job.threads.start(work) else _busy()


def _parse(head: bytes) -> HttpRequest:
    """Parses a request's head. Raises ValueError or HTTPException if it is not valid."""
    first, _, fields = head.lstrip(b"\r\n").partition(b"\n")
    method, target, version = first.decode("ascii").split()
    if not version.startswith("HTTP/1."):
        raise ValueError(f"not HTTP/1: {version}")
    headers = http.client.parse_headers(io.BytesIO(fields))
    path, _, query = target.partition("?")
    return HttpRequest(
        method, path, query, {name.lower(): value for name, value in headers.items()}
    )


def _safely(make: Callable[[], HttpResponse | DeferredResponse]) -> HttpResponse | DeferredResponse:
    try:
        return make()
    except Exception:  # noqa: BLE001 - the thread's edge; the port stays open
        _log.exception("a page of the metrics port failed")
        return HttpResponse(HTTPStatus.INTERNAL_SERVER_ERROR)


def _busy() -> HttpResponse:
    text = {"Content-Type": "text/plain; charset=utf-8", "Retry-After": "1"}
    return HttpResponse(HTTPStatus.SERVICE_UNAVAILABLE, b"too many of these at once; retry\n", text)


def _compressed(answer: HttpResponse) -> HttpResponse:
    if len(answer.body) < _SMALLEST_COMPRESSED:
        return answer
    headers = {**answer.headers, "Content-Encoding": "gzip"}
    return HttpResponse(answer.status, gzip.compress(answer.body, compresslevel=1), headers)


def _packed(answer: HttpResponse) -> bytes:
    fields = {**answer.headers, "Content-Length": str(len(answer.body)), "Connection": "close"}
    lines = [f"HTTP/1.0 {answer.status.value} {answer.status.phrase}"]
    lines += (f"{name}: {value}" for name, value in fields.items())
    return "\r\n".join((*lines, "", "")).encode("latin-1") + answer.body


def _log_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Logs an error of the loop, except a connection broken by its client."""
    _log.debug("metrics client failed", extra={"reason": str(context.get("message"))})
