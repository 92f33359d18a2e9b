"""The metrics port under attack: probes are answered, and nothing accumulates."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http import HTTPStatus

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from headrace_common.observability import http_port
from headrace_common.observability.http_port import MAX_CONNECTIONS, MAX_HEAD_BYTES
from headrace_common.observability.metrics_server import (
    MAX_PAGES,
    MAX_SCRAPES,
    MetricsServer,
    Page,
    PageAnswer,
)

PATIENCE_S = 60.0
PROBE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@contextmanager
def serving(
    *collectors: Collector, pages: Mapping[str, Page] | None = None
) -> Iterator[MetricsServer]:
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    server = MetricsServer(registry, host="127.0.0.1", port=0)
    server.set_pages(pages or {})
    try:
        yield server
    finally:
        server.close()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=PATIENCE_S)


def received(connection: socket.socket) -> bytes:
    """All bytes until the server closes or resets the connection."""
    found = b""
    try:
        while chunk := connection.recv(65536):
            found += chunk
    except ConnectionResetError:
        pass
    return found


def status_of(server: MetricsServer, request: bytes) -> int:
    """The status of the answer; 0 if there is none."""
    with connect(server) as connection:
        connection.sendall(request)
        words = received(connection).split(maxsplit=2)
    return int(words[1]) if words else 0


class BlockedCollector(Collector):
    """A scrape that hangs until it is released."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.readings = 0

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        self.readings += 1
        self.entered.set()
        self.release.wait(PATIENCE_S)
        yield from ()


class BlockedPage:
    def __init__(self) -> None:
        self.entered, self.release = threading.Semaphore(0), threading.Event()

    def answer(self, _query: Mapping[str, str]) -> PageAnswer:
        self.entered.release()
        self.release.wait(PATIENCE_S)
        return HTTPStatus.OK, "text/plain", b"done"


def test_too_many_slow_connections_close_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # no connection ends by its time limit
    monkeypatch.setattr(http_port, "HEAD_TIMEOUT_S", PATIENCE_S)
    with serving() as server, ExitStack() as opened:
        slow = [opened.enter_context(connect(server)) for _ in range(3 * MAX_CONNECTIONS)]
        for number, connection in enumerate(slow):
            if number >= 2 * MAX_CONNECTIONS + 1:
                connection.sendall(b"G")

        assert [status_of(server, PROBE) for _ in range(12)] == [200] * 12
        assert received(slow[0]) == b""
        slow[-1].sendall(PROBE[1:])
        assert received(slow[-1]).startswith(b"HTTP/1.0 200 ")


def test_a_connection_with_an_incomplete_head_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "HEAD_TIMEOUT_S", 0.05)
    with serving() as server, connect(server) as slow:
        slow.sendall(PROBE[:-2])
        assert received(slow) == b""


def test_a_connection_whose_answer_is_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "RESPONSE_TIMEOUT_S", 0.0)
    size = 64 << 20  # more than the buffers of both sockets can hold
    pages = {"/large": Page("GET", lambda _: (HTTPStatus.OK, "text/plain", b"x" * size))}
    with serving(pages=pages) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(PATIENCE_S)
        slow.connect((server.host, server.port))
        slow.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        assert 0 < len(received(slow)) < size


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /health/live HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
        (b"x" * (MAX_HEAD_BYTES + 1), 431),
        (b"GET /health/live\r\n\r\n", 400),
        (b"\xff\xfe /health/live HTTP/1.1\r\n\r\n", 400),
        (b"GET /health/live HTTP/1.1\r\n" + b"A: \r\n" * 200 + b"\r\n", 400),
        (b"POST /health/live HTTP/1.1\r\n\r\n", 405),
        (b"GET /health/live HTTP/1.0\n\n", 200),
    ],
)
def test_heads_are_bounded_and_checked(request_: bytes, status: int) -> None:
    with serving() as server:
        assert status_of(server, request_) == status
        assert status_of(server, PROBE) == 200


def test_probes_do_not_wait_for_scrapes_and_scrapes_are_bounded() -> None:
    collector = BlockedCollector()
    with serving(collector) as server, ThreadPoolExecutor(MAX_SCRAPES) as pool:
        try:
            first = pool.submit(status_of, server, SCRAPE)
            assert collector.entered.wait(PATIENCE_S)
            with ExitStack() as opened:
                waiting = [opened.enter_context(connect(server)) for _ in range(MAX_SCRAPES)]
                for connection in waiting:
                    connection.sendall(SCRAPE)
                statuses = received(waiting[-1]).split()[1]
                assert statuses == b"503"
                assert status_of(server, PROBE) == 200
                collector.release.set()
                assert first.result() == 200
                assert [received(each).split()[1] for each in waiting[:-1]] == [b"200"] * 7
        finally:
            collector.release.set()


def test_scrapes_that_wait_for_another_one_share_the_next_reading() -> None:
    collector = BlockedCollector()
    with serving(collector) as server, ThreadPoolExecutor(MAX_SCRAPES) as pool:
        try:
            first = pool.submit(status_of, server, SCRAPE)
            assert collector.entered.wait(PATIENCE_S)
            with ExitStack() as opened:
                waiting = [opened.enter_context(connect(server)) for _ in range(MAX_SCRAPES)]
                for connection in waiting:
                    connection.sendall(SCRAPE)
                assert received(waiting[-1]).split()[1] == b"503"  # the others have come
                collector.release.set()
                answers = {received(each) for each in waiting[:-1]}
                assert first.result() == 200
            assert len(answers) == 1 and collector.readings == 2
            assert status_of(server, SCRAPE) == 200
            assert collector.readings == 3
        finally:
            collector.release.set()


def test_pages_are_bounded_and_do_not_block_probes_and_scrapes() -> None:
    page = BlockedPage()
    pages = {"/debug/x": Page("GET", page.answer)}
    request = b"GET /debug/x HTTP/1.1\r\n\r\n"
    with serving(pages=pages) as server, ThreadPoolExecutor(MAX_PAGES) as pool:
        try:
            running = [pool.submit(status_of, server, request) for _ in range(MAX_PAGES)]
            for _ in running:
                assert page.entered.acquire(timeout=PATIENCE_S)
            assert status_of(server, request) == 503
            assert status_of(server, PROBE) == status_of(server, SCRAPE) == 200
        finally:
            page.release.set()
        assert [each.result() for each in running] == [200] * MAX_PAGES


def test_a_slow_page_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "RESPONSE_TIMEOUT_S", 0.0)
    page = BlockedPage()
    with (
        serving(pages={"/debug/x": Page("GET", page.answer)}) as server,
        connect(server) as client,
    ):
        client.sendall(b"GET /debug/x HTTP/1.1\r\n\r\n")
        assert page.entered.acquire(timeout=PATIENCE_S)
        page.release.set()
        assert received(client).endswith(b"done")


def test_a_page_that_fails_does_not_affect_other_pages() -> None:
    def fail(_query: Mapping[str, str]) -> PageAnswer:
        raise RuntimeError("broken page")

    with serving(pages={"/broken": Page("GET", fail)}) as server:
        assert status_of(server, b"GET /broken HTTP/1.1\r\n\r\n") == 500
        assert status_of(server, PROBE) == 200


_WITHOUT_DESCRIPTORS = """
import os, resource, socket, sys
from prometheus_client import CollectorRegistry
from headrace_common.observability.metrics_server import MetricsServer
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
server = MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0)
try:
    while True:
        os.dup(0)
except OSError:
    print(server.port, flush=True)
sys.stdin.read()
"""


def test_probes_are_answered_even_without_free_descriptors() -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", _WITHOUT_DESCRIPTORS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process,
        ExitStack() as opened,
    ):
        assert process.stdout is not None and process.stdin is not None
        opened.callback(process.stdin.close)
        address = ("127.0.0.1", int(process.stdout.readline()))
        for _ in range(3 * MAX_CONNECTIONS):
            opened.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
        for _ in range(5):
            with socket.create_connection(address, timeout=PATIENCE_S) as probe:
                probe.sendall(PROBE)
                assert received(probe).startswith(b"HTTP/1.0 200 ")
