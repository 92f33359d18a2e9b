"""A gateway distributes requests over the shards that engines report, and finds them when that
changes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import CanaryPlan, EngineStatus, QueueLimits
from headrace_common.wire.keys import shard_of
from headrace_gateway.models.models import Models
from headrace_gateway.queue_client.client import GenerationClient
from headrace_gateway.queue_client.engines import EngineDirectory
from headrace_gateway.queue_client.request_ids import RequestIds
from headrace_testing.backends import MODEL, InMemory, make_request, make_status
from headrace_testing.fake_engine import FakeEngine
from headrace_testing.gateway_group import GatewayGroup
from headrace_testing.waiting import eventually

BODY: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 10, "return_token_ids": True}


@asynccontextmanager
async def engine_of(backend: InMemory, shards: int, name: str) -> AsyncIterator[FakeEngine]:
    """An engine with `shards` shards; gateways know the number."""
    backend.shards = shards
    engine = FakeEngine(backend.engine(name), MODEL, token_delay=0.0, beat_interval=0.05)
    task = asyncio.create_task(engine.run())
    queue = backend.gateway("observer")

    async def is_known() -> bool:
        return [status.engine_id for status in await queue.engines(MODEL)] == [name]

    await eventually(is_known)
    yield engine
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.queue.close()


def spread(backend: InMemory) -> Counter[int]:
    """The shards of all requests so far."""
    ids = [rid for shard in backend.store.shards.values() for rid in shard.records]
    return Counter(map(shard_of, ids))


@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (6, 3)])
async def test_one_key_is_one_generation_when_the_shard_count_changes(
    served: Models, counts: tuple[int, int]
) -> None:
    backend = InMemory()
    group = GatewayGroup(backend, served, 60)
    answers: list[list[httpx.Response]] = []
    for number, count in enumerate(counts):
        name = f"e{number}"
        async with engine_of(backend, count, name), group.gateway(f"g{number}") as http:
            posts = (
                http.post("/v1/completions", json=BODY, headers={"idempotency-key": f"k{key}"})
                for key in range(6)
            )
            answers.append([await post for post in posts])
            status = await http.get(answers[0][5].headers["content-location"])
            assert status.json()["status"] == "completed"
    first, second = answers
    assert [answer.status_code for answer in first] == [200] * 6
    assert [answer.content for answer in second] == [answer.content for answer in first]
    assert spread(backend) == {shard: 6 // counts[0] for shard in range(counts[0])}


async def test_all_prompts_of_all_requests_are_spread(served: Models) -> None:
    backend = InMemory()
    async with engine_of(backend, 3, "e"), GatewayGroup(backend, served, 60).gateway("g") as http:
        for _ in range(2):
            answer = await http.post("/v1/completions", json={**BODY, "prompt": [[5, 6]] * 3})
            assert answer.status_code == 200
    assert spread(backend) == {0: 2, 1: 2, 2: 2}


async def test_each_shard_has_its_part_of_the_bounds() -> None:
    backend = InMemory(3)
    queue = backend.gateway()
    directory = EngineDirectory(queue)
    client = GenerationClient(queue, QueueLimits(max_requests=6), shards=directory.shards)
    engine = backend.engine()
    await engine.start()
    await engine.beat((), make_status())
    await client.start()
    ids = RequestIds(directory)
    for _ in range(6):
        await client.submit(make_request(request_id=await ids.new(MODEL, "t")))
    assert spread(backend) == {0: 2, 1: 2, 2: 2}
    await client.close()


class Away:
    """A queue that cannot be read."""

    async def engines(self, model: str) -> list[EngineStatus]:
        raise BackendUnavailable("redis: connection refused")

    async def canary_plan(self, model: str) -> CanaryPlan:
        raise BackendUnavailable("redis: connection refused")


async def test_ids_need_no_redis() -> None:
    ids = RequestIds(EngineDirectory(Away()))
    assert shard_of(await ids.new(MODEL, "t")) == 0
