"""The engines that serve a model right now, read from the queue on demand."""

import asyncio
import time
from collections.abc import Callable, Sequence

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import CanaryPlan, EngineStatus
from headrace_common.protocol.shards import shards_of
from headrace_common.protocol.variants import CANARY, STABLE, side_of
from headrace_common.wire.messages import GenerateRequest

from .ports import EngineList

LIFETIME_S = 1.0


class EngineDirectory:
    """A model's engines, at most LIFETIME_S old. A burst of requests reads them once: requests that
    come while they are read wait for the same reply."""

    def __init__(self, queue: EngineList, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._clock = clock
        self._known: dict[str, tuple[float, Sequence[EngineStatus]]] = {}
        self._plans: dict[str, CanaryPlan] = {}  # of models with a canary
        self._reading: dict[str, asyncio.Task[Sequence[EngineStatus]]] = {}

    async def engines(self, model: str) -> Sequence[EngineStatus]:
        """Returns the model's engines. Raises BackendUnavailable."""
        taken_at, engines = self._known.get(model, (-LIFETIME_S, ()))
        if self._clock() - taken_at < LIFETIME_S:
            return engines
        reading = self._reading.get(model)
        if reading is None:
            reading = self._reading[model] = asyncio.create_task(self._read(model))
            reading.add_done_callback(lambda _: self._reading.pop(model))
        return await asyncio.shield(reading)

    async def _read(self, model: str) -> Sequence[EngineStatus]:
        asked_at = self._clock()
        engines = await self._queue.engines(model)
        if any(engine.variant == CANARY for engine in engines):
            self._plans[model] = await self._queue.canary_plan(model)
        else:
            self._plans.pop(model, None)
        self._known[model] = (asked_at, engines)
        return engines

    def plan(self, model: str) -> CanaryPlan:
        """Returns what is meant for the model's canary, as `engines` last read it."""
        return self._plans.get(model, CanaryPlan())

    async def side(self, request: GenerateRequest) -> str:
        """Returns the side of engines that a new request is for; the stable one if unknown."""
        try:
            engines = await self.engines(request.model)
        except BackendUnavailable:
            return STABLE
        return side_of(request.request_id, self.plan(request.model).percent, engines)

    async def time_to_turn(self, model: str) -> float | None:
        """Returns the seconds until a sleeping engine of the model wakes for its turn; None if one
        takes work, or none is known."""
        try:
            engines = await self.engines(model)
        except BackendUnavailable:
            return None
        asleep = [engine.time_to_turn for engine in engines if not engine.draining]
        if any(engine.takes_work for engine in engines):
            return None
        return min(asleep, default=None)

    async def shards(self, model: str) -> int:
        """Returns the number of shards that new requests go to; 1 if it is not known."""
        try:
            return shards_of(await self.engines(model))
        except BackendUnavailable:
            return 1

    def forget(self) -> None:
        """Makes the next call read the queue again."""
        self._known.clear()

    async def max_model_len(self, model: str) -> int | None:
        """Returns the longest sequence that every engine can run; None without an engine."""
        return min((e.max_model_len for e in await self.engines(model)), default=None)

    async def why_unable(self, model: str, max_step_age: float) -> str | None:
        """Returns the reason why no engine can serve the model; None if an engine works or is
        idle."""
        engines = await self.engines(model)
        if not engines:
            return f"no engine serves {model}"
        working = [e for e in engines if not e.draining]
        if not working:
            return f"all {len(engines)} engines of {model} are draining"
        if min(e.last_step_age for e in working) > max_step_age:
            return f"no engine of {model} has made a step for {max_step_age:g} s"
        return None
