"""The port of a process for its metrics and health: GET /metrics, /health/live, /health/ready.

A process can add pages of its own.

A separate thread answers, so that a hung event loop or engine is still reported. Health checks run
on it and must not block; scrapes and pages have other threads, so that probes never wait for them.
It must never share a port with the API, and calls the process only through the given functions.
"""

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, cast
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from ..errors import SettingsError
from .http_port import BACKLOG, DeferredResponse, HttpPort, HttpRequest, HttpResponse, ThreadLimit

HealthCheck = Callable[[], str | None]
"""Returns the problem in words for a person, or None."""

PageAnswer = tuple[HTTPStatus, str, bytes]
"""Status, content type and body."""

# The number of scrapes that may render or wait.
MAX_SCRAPES = 8
MAX_PAGES = 4

_log = logging.getLogger(__name__)


def healthy() -> None:
    """The health check of a process that is healthy as long as it answers."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page. `answer` gets the query's fields and may block; at most MAX_PAGES run at a time."""

    method: Literal["GET", "POST"]
    answer: Callable[[Mapping[str, str]], PageAnswer]


def json_response(content: object, status: HTTPStatus = HTTPStatus.OK) -> PageAnswer:
    return status, "application/json", json.dumps(content).encode()


class MetricsServer:
    """Serves a Prometheus registry and two health checks until closed.

    `port` 0 takes a free one; the attribute `port` is the actual one. `fd` is a listening socket to
    use instead, which the parent keeps, so that no other process takes its port between two runs.
    Raises SettingsError if the address cannot be used.
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
        self._notice: HealthCheck = healthy
        self._pages: Mapping[str, Page] = {}
        self._scrape = threading.Lock()
        self._scrapes_begun = 0
        self._last_scrape: tuple[str, bytes] | None = None  # the content's type, and the content
        self._scrapes = ThreadLimit("metrics-scrape", MAX_SCRAPES)
        self._page_threads = ThreadLimit("metrics-page", MAX_PAGES, unbounded=True)
        listener = _bind(host, port) if fd is None else _adopt(fd)
        address = listener.getsockname()
        self.host, self.port = str(address[0]), int(address[1])
        self._http = HttpPort(listener, self._route, name="metrics-server")
        _log.info("metrics endpoint open", extra={"url": self.url})

    def set_health(self, *, live: HealthCheck, ready: HealthCheck) -> None:
        """Replaces both checks, once their objects exist."""
        self._checks = {"/health/live": live, "/health/ready": ready}

    def set_notice(self, notice: HealthCheck) -> None:
        """Sets a notice that /health/ready shows next to the process's readiness; None removes
        it."""
        self._notice = notice

    def set_pages(self, pages: Mapping[str, Page]) -> None:
        """Sets further pages by path."""
        self._pages = pages

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stops answering and frees the port. May be called again."""
        self._http.close()

    def _route(self, request: HttpRequest) -> HttpResponse | DeferredResponse:
        page = self._pages.get(request.path)
        if page is not None and page.method == request.method:
            return DeferredResponse(self._page_threads, lambda: _shown(page, request.query))
        if request.method != "GET" or page is not None:
            allowed = "GET" if page is None else page.method
            return HttpResponse(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": allowed})
        if request.path == "/metrics":
            accept = request.headers.get("accept", "")
            begun = self._scrapes_begun
            return DeferredResponse(self._scrapes, lambda: self._metrics(accept, begun))
        return self._health(request.path)

    def _health(self, path: str) -> HttpResponse:
        check = self._checks.get(path)
        if check is None:
            known = " ".join(("/metrics", *self._checks, *self._pages))
            return _text(HTTPStatus.NOT_FOUND, f"not found: {known}")
        problem = check()
        notice = self._notice() if path == "/health/ready" else None
        warning = "" if notice is None else f"\nwarning: {notice}"
        if problem is None:
            return _text(HTTPStatus.OK, f"ok{warning}")
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, f"{problem}{warning}")

    def _metrics(self, accept: str, begun: int) -> HttpResponse:
        """Returns the registry's content, read after the first `begun` scrapes.

        Scrapes that come while another one reads share the next reading.
        """
        # Our names need no escaping, which in OpenMetrics would replace the colons of vLLM's.
        encode, content_type = cast(tuple[Any, str], choose_encoder(accept))
        with self._scrape:  # the OpenTelemetry reader mixes up readings taken at the same time
            last = self._last_scrape
            if self._scrapes_begun > begun and last is not None and last[0] == content_type:
                body = last[1]
            else:
                self._scrapes_begun += 1
                self._last_scrape = None
                body = encode(self._registry, escaping=ALLOWUTF8)
                self._last_scrape = (content_type, body)
        return HttpResponse(HTTPStatus.OK, body, {"Content-Type": content_type})


def _shown(page: Page, query: str) -> HttpResponse:
    status, content_type, body = page.answer(dict(parse_qsl(query)))
    return HttpResponse(status, body, {"Content-Type": content_type})


def _text(status: HTTPStatus, line: str) -> HttpResponse:
    return HttpResponse(status, f"{line}\n".encode(), {"Content-Type": "text/plain; charset=utf-8"})


def _bind(host: str, port: int) -> socket.socket:
    """Opens the listener without a look-up of the host's name, which may wait for DNS."""
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise SettingsError(
            f"metrics endpoint: cannot listen on {host}:{port} ({error}); "
            "set another metrics port, or 0 for any free one"
        ) from error
    return listener


def _adopt(fd: int) -> socket.socket:
    """The parent's listening socket."""
    try:
        listener = socket.socket(fileno=fd)
        listener.getsockname()
    except OSError as error:
        raise SettingsError(f"metrics_fd: {fd} is not a listening socket: {error}") from error
    return listener
