"""Greedy requests that are repeated on a canary, on the queue in memory: which, how often, and what
is made of the answers."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headrace_common.protocol.base import CanaryPlan, QueueLimits
from headrace_common.protocol.variants import CANARY, COMPARISON_TENANT, STABLE, EngineSide
from headrace_common.sampling.params import SamplingParams
from headrace_common.wire.messages import GenerateRequest
from headrace_gateway.queue_client import canary_comparisons
from headrace_gateway.queue_client.canary_comparisons import (
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_TOKENS,
    CanaryComparisons,
    ComparisonResult,
    first_difference,
)
from headrace_gateway.queue_client.client import GenerationClient
from headrace_gateway.queue_client.engines import EngineDirectory
from headrace_gateway.queue_client.request_history import RequestHistory
from headrace_testing.backends import MODEL, InMemory, make_request, make_status
from headrace_testing.fake_engine import FakeEngine
from headrace_testing.waiting import eventually

EQUAL, DIFFERENT, UNANSWERED = ComparisonResult
PER_MINUTE = 6
ANSWER = (10, 11, 12)


@dataclass
class Store:
    """The comparisons of all gateways. `allowed`: no other gateway compares now."""

    allowed: bool = True
    asked: list[int] = field(default_factory=list)
    counted: list[bool] = field(default_factory=list)

    async def may_compare(self, model: str, interval_ms: int) -> bool:
        self.asked.append(interval_ms)
        return self.allowed

    async def compared(self, model: str, *, equal: bool) -> None:
        self.counted.append(equal)


class Scene:
    """A gateway of a model with a stable engine and a canary, whose answers are `stable` and
    `canary`."""

    def __init__(self) -> None:
        self.memory = InMemory()
        self.stable: Sequence[int] = ANSWER
        self.canary: Sequence[int] = ANSWER
        self.repeated: list[GenerateRequest] = []
        self.results: list[tuple[Any, ...]] = []
        self.store, self.now = Store(), 1000.0
        self.sides: dict[str, EngineSide] = {}
        self.history = RequestHistory(lambda: 0.0)
        queue = self.memory.gateway()
        self.directory = EngineDirectory(queue, clock=itertools.count(step=2).__next__)
        self.client = GenerationClient(
            queue, QueueLimits(), side=self.directory.side, history=self.history
        )
        self.comparisons = CanaryComparisons(
            self.client, self.directory, self.store, monotonic=lambda: self.now
        )
        self.client.on_end(self.comparisons.ended)
        self.comparisons.listen(lambda *told: self.results.append(told))
        self.memory.store.shard(MODEL).canary_plan = CanaryPlan(0, PER_MINUTE)

    def engine(self, variant: str) -> FakeEngine:
        side = self.sides[variant] = EngineSide(variant, variant or "stable", canary_wanted=True)
        queue = self.memory.engine(variant or "stable", side=side)
        engine = FakeEngine(queue, MODEL, token_delay=0.001, variant=variant)
        engine.script = self._repeats if variant == CANARY else lambda _: self.stable
        return engine

    def _repeats(self, request: GenerateRequest) -> Sequence[int]:
        self.repeated.append(request)
        return self.canary

    async def await_engines(self, count: int) -> None:
        async def listed() -> bool:
            return len(await self.directory.engines(MODEL)) == count

        await eventually(listed)

    async def answer(self, request: GenerateRequest | None = None) -> None:
        """Answers a request, and waits until its comparison has ended."""
        generation = await self.client.submit(request or greedy())
        async with asyncio.timeout(30):
            async for _ in generation:
                pass

        async def over() -> bool:
            return not self.comparisons._running

        await eventually(over)


def greedy(**fields: Any) -> GenerateRequest:
    """A greedy request, with these sampling parameters."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 500, "seed": 7, **fields})
    return replace(make_request(), sampling=sampling)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    await made.client.start()
    async with AsyncExitStack() as stack:
        # The stable engine begins later: its first beat tells it that there is a canary.
        for count, variant in enumerate((CANARY, STABLE), start=1):
            await stack.enter_async_context(made.engine(variant).running())
            await made.await_engines(count)
        yield made
        await made.comparisons.close()
    await made.client.close()


async def test_an_equal_answer_is_counted(scene: Scene) -> None:
    await scene.answer()

    assert scene.results == [(MODEL, EQUAL, None)]
    assert scene.store.counted == [True]
    assert scene.store.asked == [60_000 / PER_MINUTE]


@pytest.mark.parametrize(
    ("answer", "position"), [((10, 11, 13), 2), ((10, 11), 2), ((10, 11, 12, 13), 3)]
)
async def test_a_different_answer_is_counted_with_its_first_difference(
    scene: Scene, answer: Sequence[int], position: int
) -> None:
    scene.canary = answer
    await scene.answer()

    assert scene.results == [(MODEL, DIFFERENT, position)]
    assert scene.store.counted == [False]


async def test_a_repetition_costs_the_tenant_nothing_and_waits_after_all_requests(
    scene: Scene,
) -> None:
    original = replace(greedy(logprobs=3), tenant="acme", key="alice", cache_salt=b"salt")
    await scene.answer(replace(original, keep_ms=5, trace={"traceparent": "x"}, priority=-3))

    (found,) = scene.repeated
    assert (found.tenant, found.key, found.trace, found.keep_ms) == (COMPARISON_TENANT, "", {}, 0)
    assert (found.prompt_token_ids, found.cache_salt) == (original.prompt_token_ids, b"salt")
    assert found.priority > 1000, "the priority of batches"
    assert found.tenant_weight < 1
    assert found.sampling == replace(original.sampling, logprobs=None, max_tokens=len(ANSWER) + 1)
    assert scene.history.of("acme") and not scene.history.of(COMPARISON_TENANT)


async def test_of_a_long_answer_the_beginning_is_compared(scene: Scene) -> None:
    scene.stable = range(1, 400)
    scene.canary = [*range(1, MAX_OUTPUT_TOKENS + 1), 7, 7]
    await scene.answer()

    assert scene.results == [(MODEL, EQUAL, None)]
    assert scene.repeated[0].sampling.max_tokens == MAX_OUTPUT_TOKENS


async def test_an_answer_that_a_bound_ended_is_compared_up_to_it(scene: Scene) -> None:
    scene.canary = (*ANSWER[:2], 99)
    await scene.answer(greedy(max_tokens=2))

    assert scene.results == [(MODEL, EQUAL, None)]


async def test_an_answer_with_a_stop_string_is_compared_up_to_that(scene: Scene) -> None:
    scene.stable, scene.canary = range(1, 400), (1, 2, 99)
    generation = await scene.client.submit(greedy())
    got = 0
    async for delta in generation:
        got += len(delta.token_ids)
        if got >= 2:
            await generation.stop_choice(0, 2)

    async def compared() -> bool:
        return bool(scene.results)

    await eventually(compared)
    assert scene.results == [(MODEL, EQUAL, None)]


async def test_comparisons_are_bounded_per_minute(scene: Scene) -> None:
    for _ in range(3):
        await scene.answer()
    assert len(scene.repeated) == 1
    scene.now += 60 / PER_MINUTE
    await scene.answer()
    assert len(scene.repeated) == 2


async def test_what_another_gateway_compares_is_not_compared_twice(scene: Scene) -> None:
    scene.store.allowed = False
    await scene.answer()

    assert len(scene.store.asked) == 1
    assert not scene.repeated and not scene.results


async def test_without_a_plan_nothing_is_compared(scene: Scene) -> None:
    scene.memory.store.shard(MODEL).canary_plan = CanaryPlan(0)
    await scene.answer()

    assert not scene.store.asked


@pytest.mark.parametrize(
    ("fields", "prompt_tokens"),
    [({"temperature": 0.5}, 3), ({"n": 2}, 3), ({}, MAX_PROMPT_TOKENS + 1)],
)
async def test_other_requests_are_not_compared(
    scene: Scene, fields: dict[str, Any], prompt_tokens: int
) -> None:
    await scene.answer(replace(greedy(**fields), prompt_token_ids=(1,) * prompt_tokens))

    assert not scene.store.asked


async def test_the_canarys_own_answers_are_not_compared(scene: Scene) -> None:
    scene.memory.store.shard(MODEL).canary_plan = CanaryPlan(100, PER_MINUTE)
    await scene.answer()

    assert len(scene.repeated) == 1, "it answered"
    assert not scene.store.asked


async def test_a_cancelled_request_is_not_compared(scene: Scene) -> None:
    scene.stable = range(1, 400)
    generation = await scene.client.submit(greedy())
    await anext(aiter(generation))
    await generation.cancel()

    assert not scene.comparisons._running and not scene.store.asked


class TestWithoutACanaryThatAnswers:
    @pytest.fixture
    async def alone(self) -> AsyncIterator[Scene]:
        """The canary has said that it is there, and takes no request."""
        made = Scene()
        await made.client.start()
        canary = made.memory.engine("silent", side=EngineSide(CANARY, "new"))
        await canary.beat((), replace(make_status("silent"), variant=CANARY))
        async with made.engine(STABLE).running():
            await made.await_engines(2)
            yield made
            await made.comparisons.close()
        await made.client.close()

    async def test_a_repetition_that_no_canary_takes_is_withdrawn(
        self, alone: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(canary_comparisons, "START_WITHIN_S", 0.02)
        await alone.answer()

        assert alone.results == [(MODEL, UNANSWERED, None)]
        assert not alone.store.counted
        assert (await alone.memory.gateway().depth(MODEL)).waiting == 0

    async def test_an_answer_of_a_stable_engine_does_not_count(self, alone: Scene) -> None:
        alone.memory.store.shard(MODEL).side_beats.clear()
        alone.sides[STABLE].alone = True  # it takes the canary's requests, too
        await alone.answer()

        assert alone.results == [(MODEL, UNANSWERED, None)]
        assert not alone.store.counted

    async def test_a_full_canary_is_left_alone(self, alone: Scene) -> None:
        full = replace(make_status("silent"), variant=CANARY, running=16, capacity=16)
        await alone.memory.engine("silent", side=EngineSide(CANARY, "new")).beat((), full)
        await alone.answer()

        assert not alone.store.asked


def test_the_first_difference() -> None:
    assert first_difference((1, 2), [1, 2]) is None
    assert first_difference((1, 2), (1, 3)) == 1
    assert first_difference((1, 2), ()) == 0
    assert first_difference((1,), (1, 2)) == 1
