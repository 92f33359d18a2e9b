"""The port of a process for its metrics and health: GET /metrics, /health/live, /health/ready.

What else a process shows of itself to its operators are pages of its own.

A thread of its own answers, so that a hung event loop or engine is still reported. It blocks on its
sockets and never polls. It must never share a port with the API, nor call back into a process
other than through the given functions, which run on its threads; health checks must not block.
"""

import gzip
import json
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Literal
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from .errors import SettingsError

HealthCheck = Callable[[], str | None]
"""Says what is wrong, in words for an operator, or None where all is well."""

PageAnswer = tuple[HTTPStatus, str, bytes]
"""Status, content type and body."""

CLIENT_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 16

_log = logging.getLogger(__name__)


def healthy() -> None:
    """The health check of a process that is well as long as it answers."""


@dataclass(frozen=True, slots=True)
class Page:
    """`answer` gets the query's fields and may block: each request has a thread of its own."""

    method: Literal["GET", "POST"]
    answer: Callable[[Mapping[str, str]], PageAnswer]


def json_answer(content: object, status: HTTPStatus = HTTPStatus.OK) -> PageAnswer:
    return status, "application/json", json.dumps(content).encode()


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64
    timeout = 0.0  # handle_request() is called only when a connection waits
    render: Callable[[str, str, str], tuple[HTTPStatus, dict[str, str], bytes]]

    def __init__(
        self,
        address: tuple[str, int],
        family: socket.AddressFamily,
        listener: socket.socket | None = None,
    ) -> None:
        self.address_family = family
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler, bind_and_activate=listener is None)
        if listener is not None:
            self.socket.close()
            self.socket = listener
            self.server_address = listener.getsockname()
            self._name()

    def server_bind(self) -> None:
        """Binds without HTTPServer's look-up of the host's name, which may wait for DNS."""
        super(HTTPServer, self).server_bind()
        self._name()

    def _name(self) -> None:
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: object, client_address: object) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        _log.debug("metrics client failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        accept = self.headers.get("Accept", "")
        status, headers, body = self.server.render(self.command, self.path, accept)
        if len(body) > 1024 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: a probe every few seconds is no news."""


class MetricsServer:
    """Serves a Prometheus registry and two health checks until closed.

    `port` 0 takes a free one; `port` of the object is the real one. `fd` is a listening socket to
    use instead, which the parent holds, so that nobody else has its port between two runs. Raises
    SettingsError where the address cannot be had.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        fd: int | None = None,
        live: HealthCheck = healthy,
        ready: HealthCheck = healthy,
    ) -> None:
        self._registry = registry
        self._checks = {"/health/live": live, "/health/ready": ready}
        self._pages: Mapping[str, Page] = {}
        self._scrape = threading.Lock()
        self._http = _bind(host, port) if fd is None else _adopt(fd)
        self._http.render = self._render
        self.host, self.port = str(self._http.server_name), self._http.server_port
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="metrics-server", daemon=True)
        self._thread.start()
        _log.info("metrics endpoint open", extra={"url": self.url})

    def set_health(self, *, live: HealthCheck, ready: HealthCheck) -> None:
        """Replaces both checks, once what they look at exists."""
        self._checks = {"/health/live": live, "/health/ready": ready}

    def set_pages(self, pages: Mapping[str, Page]) -> None:
        """What is shown beside metrics and health, by path."""
        self._pages = pages

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stops answering and frees the port. May be called again."""
        if self._thread.is_alive():
            self._wake_writer.close()
            self._thread.join()

    def _serve(self) -> None:
        with self._wake_reader, self._http, selectors.DefaultSelector() as selector:
            selector.register(self._http, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while all(key.fileobj is self._http for key, _ in selector.select()):
                self._http.handle_request()

    def _render(
        self, method: str, target: str, accept: str
    ) -> tuple[HTTPStatus, dict[str, str], bytes]:
        path, _, query = target.partition("?")
        page = self._pages.get(path)
        if page is not None and page.method == method:
            status, content_type, body = page.answer(dict(parse_qsl(query)))
            return status, {"Content-Type": content_type}, body
        if method != "GET" or page is not None:
            allowed = "GET" if page is None else page.method
            return HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": allowed}, b""
        if path == "/metrics":
            return self._metrics(accept)
        return self._health(path)

    def _health(self, path: str) -> tuple[HTTPStatus, dict[str, str], bytes]:
        text = {"Content-Type": "text/plain; charset=utf-8"}
        check = self._checks.get(path)
        if check is None:
            known = " ".join(("/metrics", *self._checks, *self._pages))
            return HTTPStatus.NOT_FOUND, text, f"not found: {known}\n".encode()
        problem = check()
        if problem is None:
            return HTTPStatus.OK, text, b"ok\n"
        return HTTPStatus.SERVICE_UNAVAILABLE, text, f"{problem}\n".encode()

    def _metrics(self, accept: str) -> tuple[HTTPStatus, dict[str, str], bytes]:
        encode, content_type = choose_encoder(accept)
        with self._scrape:  # the OpenTelemetry reader mixes up readings taken at the same time
            body = encode(self._registry)
        return HTTPStatus.OK, {"Content-Type": content_type}, body


def _bind(host: str, port: int) -> _Server:
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0][0]
        return _Server((host, port), family)
    except OSError as error:
        raise SettingsError(
            f"metrics endpoint: cannot listen on {host}:{port} ({error}); "
            "set another metrics port, or 0 for any free one"
        ) from error


def _adopt(fd: int) -> _Server:
    """A server on the parent's listening socket."""
    try:
        listener = socket.socket(fileno=fd)
        listener.setblocking(True)
        address = listener.getsockname()
    except OSError as error:
        raise SettingsError(f"metrics_fd: {fd} is not a listening socket: {error}") from error
    return _Server(address[:2], listener.family, listener)
