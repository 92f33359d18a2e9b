"""Repeats a few greedy requests of the stable engines on a canary, and compares the answers.

It happens after a request's end, so no client waits for it. docs/operations.md has the rules.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile
from types import MappingProxyType
from typing import Protocol

from headrace_common.errors import HeadraceError
from headrace_common.protocol.variants import CANARY, COMPARISON_TENANT, STABLE, is_comparison
from headrace_common.wire.messages import GenerateRequest

from .client import GenerationClient
from .engines import EngineDirectory
from .generation import Generation
from .request_ids import RequestIds

logger = logging.getLogger(__name__)

MAX_PROMPT_TOKENS = 8192  # of a request that is repeated
MAX_OUTPUT_TOKENS = 256  # that are compared
# Later than every request of clients and batches, and with the least share of a tenant.
PRIORITY = 2**31 - 1
WEIGHT = 0.01
LIFETIME_S = 60.0
# A request that no canary has begun after PATIENCE of variants.lua is for stable engines, too.
START_WITHIN_S = 5.0
MINUTE_S = 60.0
_NO_TRACE: Mapping[str, str] = MappingProxyType({})


class ComparisonResult(StrEnum):
    """What became of a comparison; UNANSWERED: no canary had room, or its answer failed."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNANSWERED = "unanswered"


class ComparisonStore(Protocol):
    """The comparisons of all gateways. Raises BackendUnavailable."""

    async def may_compare(self, model: str, interval_ms: int) -> bool: ...

    async def compared(self, model: str, *, equal: bool) -> None: ...


class ComparisonListener(Protocol):
    def __call__(
        self, model: str, result: ComparisonResult, first_difference: int | None = None
    ) -> None:
        """Hears of each comparison; `first_difference` is an output position, if there is one."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """An answered request. `tokens` is the part of its answer that is compared, `engine_id` the
    engine that generated it. The repetition generates `max_tokens` at most."""

    request: GenerateRequest
    tokens: Sequence[int]
    max_tokens: int
    engine_id: str


class CanaryComparisons:
    """Compares, for each model with a canary, as often as its plan says over all gateways.

    Hears of the client's ended requests by `ended`. At most one comparison of a model runs here at
    a time. `clock` gives Unix seconds, `monotonic` seconds.
    """

    def __init__(
        self,
        client: GenerationClient,
        engines: EngineDirectory,
        store: ComparisonStore,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._engines, self._store = client, engines, store
        self._clock, self._monotonic = clock, monotonic
        self._ids = RequestIds(engines)
        self._next: dict[str, float] = {}  # when a model may be compared again
        self._running: dict[str, asyncio.Task[None]] = {}
        self._listener: ComparisonListener | None = None

    def listen(self, listener: ComparisonListener) -> None:
        """Has `listener` called after each comparison. It must not raise."""
        self._listener = listener

    def ended(self, generation: Generation) -> None:
        """Compares a request that has just ended, if it is one to compare and it is time."""
        model = generation.request.model
        per_minute = self._engines.plan(model).comparisons_per_minute
        if not per_minute or model in self._running:
            return
        now = self._monotonic()
        if now < self._next.get(model, now) or (sample := _sample(generation)) is None:
            return
        self._next[model] = now + MINUTE_S / per_minute
        task = asyncio.create_task(self._run(sample, MINUTE_S / per_minute), name="comparison")
        self._running[model] = task
        task.add_done_callback(lambda _: self._running.pop(model, None))

    async def close(self) -> None:
        """Cancels what runs."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, sample: _Sample, interval: float) -> None:
        model = sample.request.model
        try:
            await self._compare(sample, interval)
        except HeadraceError as error:
            extra = {"model": model, "error": str(error)}
            logger.info("answer not compared with a canary's", extra=extra)
            self._tell(model, ComparisonResult.UNANSWERED)

    async def _compare(self, sample: _Sample, interval: float) -> None:
        model = sample.request.model
        engines = await self._engines.engines(model)
        if not any(e.engine_id == sample.engine_id and e.variant == STABLE for e in engines):
            return
        canaries = [e for e in engines if e.variant == CANARY and e.takes_work]
        if not any(engine.running < engine.capacity for engine in canaries):
            return
        if not await self._store.may_compare(model, round(interval * 1000)):
            return
        found = await self._repeat(sample, {engine.engine_id for engine in canaries})
        if found is None:
            self._tell(model, ComparisonResult.UNANSWERED)
            return
        position = first_difference(sample.tokens, found)
        await self._store.compared(model, equal=position is None)
        equal, different = ComparisonResult.EQUAL, ComparisonResult.DIFFERENT
        self._tell(model, equal if position is None else different, position)

    async def _repeat(self, sample: _Sample, canaries: set[str]) -> Sequence[int] | None:
        """The canary's answer; None if none of the `canaries` gave it whole and in time."""
        request = await self._request(sample)
        tokens: list[int] = []
        try:
            async with (
                await self._client.submit(request) as generation,
                asyncio.timeout(START_WITHIN_S) as limit,
            ):
                async for delta in generation:
                    limit.reschedule(None)
                    tokens += delta.token_ids
        except TimeoutError:
            return None
        owner = generation.arbiter.owner
        return tokens if owner is not None and owner[0] in canaries and owner[1] == 1 else None

    async def _request(self, sample: _Sample) -> GenerateRequest:
        original, now = sample.request, self._clock()
        sampling = original.sampling
        return replace(
            original,
            request_id=await self._ids.new(original.model, COMPARISON_TENANT),
            sampling=replace(
                sampling,
                max_tokens=sample.max_tokens,
                min_tokens=min(sampling.min_tokens, sample.max_tokens),
                logprobs=None,
                prompt_logprobs=None,
            ),
            created_ms=int(now * 1000),
            deadline_ms=int((now + LIFETIME_S) * 1000),
            tenant=COMPARISON_TENANT,
            tenant_weight=WEIGHT,
            key="",
            priority=PRIORITY,
            trace=_NO_TRACE,
            keep_ms=0,
            window_ms=0,
            variant=CANARY,
        )

    def _tell(self, model: str, result: ComparisonResult, position: int | None = None) -> None:
        if self._listener is not None:
            self._listener(model, result, position)


def _sample(generation: Generation) -> _Sample | None:
    """What to repeat of an ended request; None if its answer is not to be compared."""
    request, sampling, owner = generation.request, generation.request.sampling, generation.owner
    if (
        owner is None
        or owner[1] != 1  # several engines may have generated it
        or generation.failed
        or request.variant != STABLE
        or is_comparison(request)
        or sampling.temperature != 0
        or sampling.branches != 1
        or request.pooling is not None
        or request.images
        or len(request.prompt_token_ids) > MAX_PROMPT_TOKENS
    ):
        return None
    tokens = generation.tokens(0)[:MAX_OUTPUT_TOKENS]
    if not tokens:
        return None
    # If an answer ended by itself, one token more shows whether the other one goes on.
    longest = min(len(tokens) + generation.ended_by_itself(0), MAX_OUTPUT_TOKENS)
    longest = min(longest, sampling.max_tokens or longest)
    return _Sample(request, tokens, longest, owner[0])


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two answers differ; None if they are equal."""
    if list(one) == list(other):
        return None
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
