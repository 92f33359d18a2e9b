"""The console over HTTP: its page, its stream, and access to them."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headrace_common.config.supervisor_socket import (
    KillAnswer,
    decode_request,
    encode,
    socket_pair,
)
from headrace_gateway.console.engine_supervisor import EngineSupervisor
from headrace_gateway.console.live_feed import MAX_TENANT_WATCHERS, MAX_WATCHERS
from headrace_gateway.limits.api_keys import KeyFile
from headrace_testing.api_keys import KeyBook
from headrace_testing.gateway import MODEL, Gateway, connected, engine_status, events, serve
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

KILL = {"x-headrace-console": "1"}


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> KeyBook:
    book = KeyBook(tmp_path_factory.mktemp("keys") / "keys.yaml")
    book.add("alice", tenant="a")
    for number in range(MAX_WATCHERS):
        book.add(f"many-{number}", tenant=f"t{number}")
    book.add("elsewhere", tenant="b", models=("another",))
    return book


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(checkpoint: Path, book: KeyBook) -> AsyncIterator[Gateway]:
    async with serve(checkpoint, keys=KeyFile(book.path)) as running:
        yield running


async def snapshots(
    http: httpx.AsyncClient, count: int = 1, headers: Mapping[str, str] | None = None
) -> list[Any]:
    answer = await http.get("/console/live", params={"events": count}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.count("event: snapshot\n") == count
    return list(events(answer.text))


def code(answer: httpx.Response) -> Any:
    return answer.json()["error"]["code"]


async def watch(gateway: Gateway, key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens a stream and reads its first event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"GET /console/live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"
    writer.write(head.encode())
    await reader.readuntil(b"data: ")
    return reader, writer


# The page


async def test_the_page_is_served_with_a_policy_that_allows_only_its_own_files(
    gateway: Gateway,
) -> None:
    for path in ("/", "/console/index.html"):
        page = await gateway.http.get(path)
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(policy)
        assert page.headers["x-content-type-options"] == "nosniff"
        assert "unsafe" not in page.headers["content-security-policy"]


async def test_the_page_names_no_other_site(gateway: Gateway) -> None:
    page = (await gateway.http.get("/")).text
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)


async def test_an_unchanged_file_is_not_sent_again(gateway: Gateway) -> None:
    first = await gateway.http.get("/")
    again = await gateway.http.get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (await gateway.http.head("/")).headers["etag"] == first.headers["etag"]


@pytest.mark.parametrize("name", ["nothing", "..%2flive_feed.py", "%2e%2e%2f__init__.py", ".x"])
async def test_only_the_files_of_the_page_are_served(gateway: Gateway, name: str) -> None:
    answer = await gateway.http.get(f"/console/{name}")
    assert (answer.status_code, code(answer)) == (404, "not_found")


async def test_the_setting_switches_page_and_data_off(checkpoint: Path) -> None:
    async with serve(checkpoint, console=False) as running:
        paths = ("/", "/console/index.html", "/console/live", "/console/requests")
        for path in (*paths, "/console/limits"):
            assert (await running.http.get(path)).status_code == 404
        answer = await running.http.post("/console/engines/e.1/kill", headers=KILL)
        assert answer.status_code == 404


async def test_the_limits_of_a_chat_are_those_of_the_settings(checkpoint: Path) -> None:
    limits: dict[str, Any] = {"max_images": 3, "max_image_bytes": 4096, "max_image_pixels": 10_000}
    async with serve(checkpoint, **limits, max_body_bytes=65_536) as running:
        assert (await running.http.get("/console/limits")).json() == {
            "images": 3,
            "image_bytes": 4096,
            "image_pixels": 10_000,
            "body_bytes": 65_536,
        }


# The stream


async def test_the_stream_tells_of_models_and_engines(gateway: Gateway) -> None:
    gateway.engine.statuses = [engine_status(name="engine-0", running=3, draining=True)]

    (found,) = await snapshots(gateway.http)

    assert found["console"] == {
        "version": found["console"]["version"],
        "kill": False,
        "keys": False,
    }
    (model,), (engine,) = found["models"], found["engines"]
    assert (model["name"], model["waiting"], model["limit_requests"]) == (MODEL, 0, 1024)
    assert model["scaling"] is None
    assert (engine["id"], engine["name"], engine["state"]) == ("e.1", "engine-0", "draining")
    assert (engine["detail"], engine["running"]) == (False, 3)


async def test_events_come_regularly_even_without_changes(gateway: Gateway) -> None:
    first, second = await snapshots(gateway.http, 2)
    assert second["time"] > first["time"]
    assert {**first, "time": 0} == {**second, "time": 0}


async def test_streams_are_limited_for_each_tenant_and_gateway(
    guarded: Gateway, book: KeyBook
) -> None:
    feed = guarded.app.state.services.live_feed
    alice = book.headers("alice")

    async def nobody_watches() -> bool:
        return not feed.tenants

    opened = [await watch(guarded, book.secrets["alice"]) for _ in range(MAX_TENANT_WATCHERS)]

    refused = await guarded.http.get("/console/live", headers=alice)
    assert (refused.status_code, code(refused)) == (429, "too_many_watchers")
    assert int(refused.headers["retry-after"]) > 0

    for number in range(MAX_WATCHERS - MAX_TENANT_WATCHERS):
        opened.append(await watch(guarded, book.secrets[f"many-{number}"]))
    last = book.headers(f"many-{MAX_WATCHERS - 1}")
    assert (await guarded.http.get("/console/live", headers=last)).status_code == 429

    for _, writer in opened:
        writer.close()
    await eventually(nobody_watches)
    (found,) = await snapshots(guarded.http, headers=alice)
    assert found["console"]["keys"] is True


async def test_a_key_sees_only_its_models(guarded: Gateway, book: KeyBook) -> None:
    (found,) = await snapshots(guarded.http, headers=book.headers("elsewhere"))
    assert (found["models"], found["engines"]) == ([], [])


async def test_a_stream_ends_when_the_gateway_drains(checkpoint: Path) -> None:
    async with serve(checkpoint) as running, connected(running.port) as (reader, writer):
        writer.write(b"GET /console/live HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"data: ")
        running.server.stop()
        async with asyncio.timeout(60):
            assert (await reader.read()).endswith(b"0\r\n\r\n")


# Killing an engine


@dataclass(slots=True)
class Supervised:
    """A gateway with a supervisor that runs the engine e.1.

    Records the ids that the supervisor was given.
    """

    gateway: Gateway
    kill_requests: list[str]

    async def kill(self, engine_id: str, **headers: str) -> httpx.Response:
        return await self.gateway.http.post(f"/console/engines/{engine_id}/kill", headers=headers)


@pytest_asyncio.fixture(loop_scope="session")
async def supervised(checkpoint: Path) -> AsyncIterator[Supervised]:
    kill_requests: list[str] = []
    ours, theirs = socket_pair()

    async def answer() -> None:
        loop = asyncio.get_running_loop()
        while True:
            request = decode_request(await loop.sock_recv(ours, 2048))
            kill_requests.append(request.engine_id)
            stale = KillAnswer(request.number - 1, "of an earlier process")
            await loop.sock_sendall(ours, encode(stale))
            killed = "engine-0" if request.engine_id == "e.1" else None
            await loop.sock_sendall(ours, encode(KillAnswer(request.number, killed)))

    with ours, theirs:
        task = asyncio.create_task(answer())
        async with serve(checkpoint, supervisor=EngineSupervisor(theirs)) as running:
            yield Supervised(running, kill_requests)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_is_killed_by_its_supervisor(supervised: Supervised) -> None:
    (found,) = await snapshots(supervised.gateway.http)
    assert found["console"]["kill"] is True
    answer = await supervised.kill("e.1", **KILL)
    assert (answer.status_code, answer.json()) == (202, {"killed": "engine-0"})
    assert supervised.kill_requests == ["e.1"]


@pytest.mark.parametrize("headers", [{}, {**KILL, "origin": "https://elsewhere.example"}])
async def test_a_page_of_another_site_kills_nothing(
    supervised: Supervised, headers: dict[str, str]
) -> None:
    answer = await supervised.kill("e.1", **headers)
    assert (answer.status_code, code(answer)) == (400, "console_header_missing")
    assert supervised.kill_requests == []


async def test_only_an_engine_that_is_shown_is_killed(supervised: Supervised) -> None:
    for engine_id in ("e.2", "x" * 5000):
        answer = await supervised.kill(engine_id, **KILL)
        assert (answer.status_code, code(answer)) == (404, "engine_not_found")
    assert supervised.kill_requests == []


async def test_an_engine_of_another_machine_is_not_killed(supervised: Supervised) -> None:
    supervised.gateway.engine.statuses = [engine_status(engine_id="elsewhere.1")]
    answer = await supervised.kill("elsewhere.1", **KILL)
    assert (answer.status_code, code(answer)) == (404, "engine_not_found")
    assert supervised.kill_requests == ["elsewhere.1"]


async def test_without_a_supervisor_nothing_is_killed(gateway: Gateway) -> None:
    answer = await gateway.http.post("/console/engines/e.1/kill", headers=KILL)
    assert (answer.status_code, code(answer)) == (404, "engine_not_found")


async def test_a_supervisor_that_does_not_answer_is_not_waited_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_gateway.console.engine_supervisor.TIMEOUT_S", 0.01)
    ours, theirs = socket_pair()
    with ours, theirs:
        async with serve(checkpoint, supervisor=EngineSupervisor(theirs)) as running:
            answer = await running.http.post("/console/engines/e.1/kill", headers=KILL)
        assert (answer.status_code, code(answer)) == (503, "supervisor_silent")
        assert decode_request(ours.recv(2048)).engine_id == "e.1"
