"""Timelines of requests: what the queue's client records of them, in order and bounded."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from headrace_common.errors import QueueFull
from headrace_common.protocol.arbiter import Arbiter
from headrace_common.protocol.base import EngineQueue, Lease, QueueLimits
from headrace_common.wire.messages import GenerateRequest, Takeover, Tokens
from headrace_gateway.queue_client.client import ClientConfig, Generation, GenerationClient
from headrace_gateway.queue_client.request_history import (
    MAX_ENGINES,
    MAX_EVENTS,
    MAX_REQUESTS,
    MAX_TENANTS,
    RequestHistory,
)
from headrace_testing.backends import InMemory, make_request
from headrace_testing.waiting import eventually

CONFIG = ClientConfig(beat_interval=0.1, silence=5.0, recheck=5.0, longest_recheck=5.0)


class Clock:
    """A clock that advances by a second at each reading."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def memory() -> InMemory:
    return InMemory()


@pytest.fixture
def history() -> RequestHistory:
    return RequestHistory(Clock())


@pytest.fixture
async def client(memory: InMemory, history: RequestHistory) -> AsyncIterator[GenerationClient]:
    limits = QueueLimits(max_requests=2)
    client = GenerationClient(memory.gateway(), limits, config=CONFIG, history=history)
    await client.start()
    yield client
    await client.close()


def only(history: RequestHistory) -> dict[str, Any]:
    (timeline,) = history.of("default")
    return timeline.content()


def whats(content: dict[str, Any]) -> list[str]:
    return [event["what"] for event in content["events"]]


async def take(engine: EngineQueue) -> Lease:
    (lease,) = await engine.take(1)
    return lease


def tokens(lease: Lease, index: int, *ids: int, **more: Any) -> Tokens:
    return Tokens(lease.request.request_id, lease.attempt, 0, index, ids, **more)


async def say(engine: EngineQueue, lease: Lease, *replies: Any) -> None:
    await engine.publish({lease.gateway_id: replies})


async def read(generation: Generation, count: int) -> None:
    async with asyncio.timeout(30):
        found = 0
        while found < count:
            found += len((await anext(generation)).token_ids)


async def test_a_request_has_a_timeline_from_its_acceptance_to_its_end(
    memory: InMemory, history: RequestHistory, client: GenerationClient
) -> None:
    request = make_request()
    generation = await client.submit(request)
    history.note_path("/v1/chat/completions", [request])
    assert only(history)["state"] == "running"
    assert only(history)["times"]["started"] is None

    engine = memory.engine("e")
    lease = await take(engine)
    await say(engine, lease, tokens(lease, 0, 7, cached_tokens=2, took_ms=500))
    await read(generation, 1)
    await say(engine, lease, tokens(lease, 1, 8), tokens(lease, 2, 9, finish_reason="length"))
    await read(generation, 2)

    content = only(history)
    assert content["id"] == request.request_id
    assert (content["path"], content["model"]) == ("/v1/chat/completions", request.model)
    assert (content["state"], content["finish_reason"]) == ("finished", "length")
    assert content["error"] is None
    assert (content["prompt_tokens"], content["cached_tokens"]) == (
        len(request.prompt_token_ids),
        2,
    )
    assert content["output_tokens"] == 3
    assert content["engines"] == ["e"]
    assert whats(content) == ["accepted", "started", "first_token", "ended"]
    times = content["times"]
    assert times["first_token"] - times["started"] == 0.5
    assert times["accepted"] < times["started"] < times["first_token"] < times["ended"]


async def test_a_request_that_moves_names_both_engines(
    memory: InMemory, history: RequestHistory, client: GenerationClient
) -> None:
    request = make_request()
    generation = await client.submit(request)
    one, other = memory.engine("one"), memory.engine("other")
    lease = await take(one)
    await say(one, lease, tokens(lease, 0, 7))
    await read(generation, 1)
    rid, attempt = request.request_id, lease.attempt + 1
    await say(other, lease, Takeover(request_id=rid, attempt=attempt, round=1))
    await say(other, lease, Tokens(rid, attempt, 0, 1, (8,), finish_reason="stop"))
    await read(generation, 1)

    content = only(history)
    assert whats(content) == ["accepted", "started", "first_token", "moved", "ended"]
    assert content["engines"] == ["one", "other"]
    assert [event["engine"] for event in content["events"]] == [
        None,
        "one",
        "one",
        "other",
        "other",
    ]


async def test_a_request_that_its_client_cancels(
    history: RequestHistory, client: GenerationClient
) -> None:
    generation = await client.submit(make_request())
    await generation.cancel()
    content = only(history)
    assert (content["state"], content["error"]) == ("cancelled", "cancelled")
    assert whats(content) == ["accepted", "ended"]


async def test_a_request_that_fails(history: RequestHistory, client: GenerationClient) -> None:
    await client.submit(make_request(seconds=-1))

    async def failed() -> bool:
        return bool(only(history)["state"] == "failed")

    await eventually(failed)
    assert only(history)["error"] == "deadline_exceeded"


async def test_a_refused_request_is_not_in_the_history(
    history: RequestHistory, client: GenerationClient
) -> None:
    for _ in range(2):
        await client.submit(make_request())
    refused = make_request()
    with pytest.raises(QueueFull):
        await client.submit(refused)
    assert history.find("default", refused.request_id) is None
    assert len(history.of("default")) == 2


async def test_a_snapshot_has_the_requests_times_and_engines(
    history: RequestHistory, client: GenerationClient
) -> None:
    request = make_request()
    await client.submit(request)
    timeline = history.find("default", request.request_id)
    assert timeline is not None
    timeline.seen("e", 0.25, preempted=False)
    for preempted in (True, True, False, True):
        timeline.seen("e", 1.0, preempted=preempted)
    content = timeline.content()
    assert whats(content) == ["accepted", "started", "preempted", "preempted"]
    assert content["engines"] == ["e"]


async def test_events_and_engines_of_one_request_are_bounded(
    history: RequestHistory, client: GenerationClient, memory: InMemory
) -> None:
    request = make_request()
    generation = await client.submit(request)
    lease = await take(memory.engine("e"))
    for attempt in range(1, 60):
        moved = Takeover(request_id=request.request_id, attempt=attempt, round=1)
        await say(memory.engine(f"e{attempt}"), lease, moved)
    await say(memory.engine("e59"), lease, Tokens(request.request_id, 59, 0, 0, (1,)))
    await read(generation, 1)
    await generation.cancel()
    content = only(history)
    assert len(content["events"]) == MAX_EVENTS
    assert whats(content)[-1] == "ended"
    assert len(content["engines"]) == MAX_ENGINES
    assert content["engines"][-1] == "e59"


def test_requests_and_tenants_are_bounded() -> None:
    history = RequestHistory(Clock())
    arbiter = Arbiter("0.a", 1)

    def begin(tenant: str) -> GenerateRequest:
        request = replace(make_request(), tenant=tenant)
        history.begin(request, arbiter)
        return request

    begun = [begin("busy") for _ in range(MAX_REQUESTS + 5)]
    assert len(history.of("busy")) == MAX_REQUESTS
    assert history.find("busy", begun[4].request_id) is None
    assert history.find("busy", begun[5].request_id) is not None
    for number in range(MAX_TENANTS):
        begin(f"t{number}")
    assert history.of("busy") == []
    assert len(history.of("t0")) == 1
