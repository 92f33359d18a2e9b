"""Many requests of one tenant, and requests whose clients have left, do not delay other tenants."""

import asyncio
import json
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_common.observability import metric_names as names
from headrace_common.observability.telemetry import setup
from headrace_common.protocol.base import EngineStatus
from headrace_gateway.http.app import AppDependencies, create_app
from headrace_gateway.http.server import GatewayProtocol
from headrace_gateway.http.services import Services
from headrace_gateway.limits.api_keys import KeyFile
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models
from headrace_gateway.settings import GatewaySettings
from headrace_testing.api_keys import KeyBook
from headrace_testing.gateway import MODEL, Gateway, ScriptedEngine, running
from headrace_testing.telemetry import scrape, value
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

MOST, CLIENTS = 3, 20
BODY = {"model": MODEL, "prompt": "Hello world"}


def post() -> bytes:
    content = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(content) + content


def connect(gateway: Gateway) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port))


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    """Notes each call of a method."""
    found: list[None] = []
    method = getattr(owner, name)

    def noted(*arguments: Any) -> Any:
        found.append(None)
        return method(*arguments)

    monkeypatch.setattr(owner, name, noted)
    return found


async def assert_only_one_is_queued(gateway: Gateway) -> None:
    """Sends a request, and checks that no other one was queued before it."""
    assert (await gateway.complete()).status_code == 200
    await eventually(gateway.is_idle)
    assert len(gateway.engine.submitted) == 1


async def test_a_tenant_with_too_many_open_requests_gets_429(
    checkpoint: Path, tmp_path: Path
) -> None:
    book, telemetry = KeyBook(tmp_path / "keys.yaml"), setup("gateway", metrics_port=0)
    book.add("alice", tenant="team-a")
    book.add("bob", tenant="team-b")
    settings = GatewaySettings(
        model=str(checkpoint),
        served_model_name=MODEL,
        port=0,
        drain_timeout=0,
        max_open_requests_per_tenant=MOST,
    )
    served = Models(load_static(settings))
    engine = ScriptedEngine(served.get(MODEL).tokenizer)
    keys = KeyFile(book.path)
    deps = AppDependencies(
        served=served, client=engine, queue=engine, telemetry=telemetry, keys=keys
    )
    alice, bob = book.headers("alice"), book.headers("bob")

    async def all_arrived() -> bool:
        return len(engine.submitted) == MOST

    engine.gate.clear()
    async with running(create_app(settings, deps), settings) as (_, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            posts = [
                asyncio.create_task(http.post("/v1/completions", json=BODY, headers=alice))
                for _ in range(MOST)
            ]
            await eventually(all_arrived)
            refused = await http.post("/v1/completions", json=BODY, headers=alice)
            other = await http.get("/v1/models", headers=bob)
            engine.gate.set()
            answers = await asyncio.gather(*posts)
            later = await http.post("/v1/completions", json=BODY, headers=alice)
        assert telemetry.server is not None
        families = await asyncio.to_thread(scrape, telemetry.server.url)
    telemetry.shutdown()

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
    assert refused.json()["error"]["code"] == "too_many_open_requests"
    assert other.status_code == later.status_code == 200
    assert [answer.status_code for answer in answers] == [200] * MOST
    tenant = {names.TENANT_LABEL: "team-a"}
    assert value(families, names.GATEWAY_OPEN_REFUSED.prometheus_name, **tenant) == 1


async def test_connections_that_are_reset_before_they_are_accepted_are_not_read(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = calls(monkeypatch, GatewayProtocol, "on_message_begin")

    for _ in range(CLIENTS):  # the server, on this event loop, accepts nothing meanwhile
        connection = connect(gateway)
        connection.sendall(post())
        reset(connection)

    await assert_only_one_is_queued(gateway)
    assert len(read) <= 1, "the last request may use a connection from before"


async def test_requests_that_are_reset_before_their_turn_begin_nothing(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = calls(monkeypatch, Services, "body")
    server = gateway.server.server_state
    before = len(server.connections)

    async def accepted() -> bool:
        return len(server.connections) == before + CLIENTS

    connections = [connect(gateway) for _ in range(CLIENTS)]
    await eventually(accepted)
    for connection in connections:
        connection.sendall(post())
        reset(connection)

    await assert_only_one_is_queued(gateway)
    assert len(begun) == 1


async def test_nothing_is_queued_for_a_client_that_leaves_while_its_prompt_is_read(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()
    engines = gateway.engine.engines

    async def slow_engines(model: str) -> Sequence[EngineStatus]:
        asked.set()
        await may_answer.wait()
        return await engines(model)

    monkeypatch.setattr(gateway.engine, "engines", slow_engines)
    gateway.forget_engines()
    connection = connect(gateway)
    connection.sendall(post())
    async with asyncio.timeout(30):
        await asked.wait()
    connection.close()
    may_answer.set()

    await assert_only_one_is_queued(gateway)
