"""The whole gateway on the real client and queue, in memory and on Valkey, with a fake engine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from headrace_common.protocol.base import QueueLimits
from headrace_gateway.http.app import AppDependencies, create_app
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models
from headrace_gateway.queue_client.client import GenerationClient
from headrace_gateway.settings import GatewaySettings
from headrace_testing.backends import MODEL, Backend, InMemory, OverRedis
from headrace_testing.fake_engine import FakeEngine, is_one_history
from headrace_testing.gateway import events, running
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import eventually


@pytest.fixture(params=["memory", "valkey"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    if request.param == "memory":
        yield InMemory()
        return
    server = ValkeyServer(tmp_path / "valkey")
    server.start()
    over_redis = OverRedis(server.url, block=1.0)
    yield over_redis
    await over_redis.close()
    server.kill()


@pytest.fixture
async def http(backend: Backend, checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = GatewaySettings(
        model=str(checkpoint), served_model_name=MODEL, port=0, drain_timeout=0
    )
    queue = backend.gateway()
    client = GenerationClient(queue, QueueLimits(max_requests=4))
    await client.start()
    deps = AppDependencies(served=Models(load_static(settings)), client=client, queue=queue)
    async with running(create_app(settings, deps), settings) as (_, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            yield http
    await client.close()


@pytest.fixture
async def engine(backend: Backend) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(backend.engine(), MODEL, token_delay=0.001)
    task = asyncio.create_task(engine.run())
    yield engine
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_streams_carry_every_token_once(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": "x", "n": 2, "max_tokens": 40, "stream": True, "return_token_ids": True}

    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(4)))

    for answer in answers:
        tokens: list[list[int]] = [[], []]
        for chunk in events(answer.text):
            choice = chunk["choices"][0]
            tokens[choice["index"]] += choice["token_ids"]
        assert [len(ids) for ids in tokens] == [40, 40]
        assert is_one_history(0, tokens[0]) and is_one_history(1, tokens[1])


async def test_a_whole_answer_counts_its_tokens(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    answer = await http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 5})

    body = answer.json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 7


async def test_a_client_that_leaves_empties_the_queue(
    http: httpx.AsyncClient, backend: Backend
) -> None:
    queue = backend.gateway("observer")

    async def waiting() -> bool:
        return (await queue.depth(MODEL)).waiting == 1

    async def empty() -> bool:
        return (await queue.depth(MODEL)).waiting == 0

    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
    await eventually(waiting)
    asking.cancel()

    await eventually(empty)


async def test_a_full_queue_says_when_to_come_back(http: httpx.AsyncClient) -> None:
    waiting = [
        asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"})) for _ in range(8)
    ]
    done, pending = await asyncio.wait(waiting, return_when="FIRST_COMPLETED", timeout=60)
    refused = done.pop().result()
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
