"""Probes of real processes are answered despite other connections to any of their ports."""

import resource
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from headrace_testing.processes import until
from headrace_testing.single import SingleStack
from headrace_testing.stack import GatewayProcess

CROWD = 200
PROBES = 12
DESCRIPTORS = 128


def live(port: int) -> bool:
    """Whether the liveness probe is answered within the kubelet's timeout."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=20) as answer:
        return bool(answer.status == 200)


@contextmanager
def crowd(port: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Opens connections that have sent `sent` and stay open."""
    with ExitStack() as opened:
        connections = []
        for _ in range(CROWD):
            connection = socket.create_connection(("127.0.0.1", port), 60)
            connections.append(opened.enter_context(connection))
            connection.sendall(sent)
        yield connections


@pytest.mark.parametrize("name", ["engine", "gateway"])
@pytest.mark.parametrize("sent", [b"", b"GET /health/live HTTP/1.1\r\nX: "], ids=["silent", "half"])
def test_slow_connections_to_the_metrics_port_do_not_delay_liveness(
    single: SingleStack, name: str, sent: bytes
) -> None:
    process = single.engine if name == "engine" else single.gateway
    with crowd(process.metrics_port, sent):
        assert all(live(process.metrics_port) for _ in range(PROBES))


@pytest.mark.parametrize("name", ["engine", "gateway"])
def test_scrapes_whose_answers_are_not_read_do_not_delay_liveness(
    single: SingleStack, name: str
) -> None:
    process = single.engine if name == "engine" else single.gateway
    with crowd(process.metrics_port, b"GET /metrics HTTP/1.1\r\n\r\n"):
        assert all(live(process.metrics_port) for _ in range(PROBES))


def test_idle_connections_to_the_api_leave_descriptors_for_probes(
    single: SingleStack, tmp_path: Path
) -> None:
    with GatewayProcess(None, single.valkey.url, tmp_path / "gateway.log") as gateway:
        until(lambda: gateway.ready, "the gateway to be ready")
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        with crowd(gateway.port, b""):
            assert all(live(gateway.metrics_port) for _ in range(PROBES))


def test_an_engine_has_no_debug_pages_by_default(single: SingleStack) -> None:
    url = f"http://127.0.0.1:{single.engine.metrics_port}"
    assert httpx.get(f"{url}/debug/requests").status_code == 404
    assert httpx.post(f"{url}/debug/profile").status_code == 405
