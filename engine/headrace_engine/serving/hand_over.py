"""Disaggregated prefill: which requests this engine takes, and which it hands over.

A producer hands a request over after its first token, once the shared tier has the KV of its full
blocks. It generates until then, so the client waits only for the other engine. If no other engine
has room, it goes on with the request itself.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import EngineQueue, EngineStatus, TakeBounds
from headrace_common.protocol.kv_roles import Fleet, KVRole

from ..core.errors import ConfigError
from ..engine.engine import Engine
from ..engine.engine_loop import EngineLoop
from .leased_request import LeasedRequest
from .metrics import EngineMetrics
from .request_tracker import RequestTracker
from .role_config import RoleConfig

logger = logging.getLogger(__name__)

# Seconds between two looks at the other engines.
INTERVAL = 1.0


class HandOver:
    """One engine's part in disaggregated prefill. Used on the event loop only.

    `status` makes the engine's own status. A token's KV takes `kv_bytes_per_token`. `on_error` is
    called with an error that is a bug. Raises ConfigError if the engine shares no KV.
    """

    def __init__(
        self,
        config: RoleConfig,
        *,
        queue: EngineQueue,
        engine: Engine,
        loop: EngineLoop,
        tracker: RequestTracker,
        metrics: EngineMetrics,
        status: Callable[[], EngineStatus],
        block_size: int,
        kv_bytes_per_token: float,
        on_error: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if not engine.shares_kv:
            raise ConfigError(
                f"kv_role {config.role} needs a model that generates, whose KV can be shared: use "
                "kv_both"
            )
        self._config = config
        self._queue, self._engine, self._loop = queue, engine, loop
        self._tracker, self._metrics = tracker, metrics
        self._status = status
        self._block_size, self._kv_bytes_per_token = block_size, kv_bytes_per_token
        self._on_error = on_error
        self._clock, self._sleep = clock, sleep
        self._event_loop = asyncio.get_running_loop()
        self._bounds = TakeBounds()
        self._room = 0  # sequences that other engines can go on with
        self._moving: set[str] = set()  # engine keys of requests whose KV is being written
        self._tasks: set[asyncio.Task[None]] = set()

    async def keep(self) -> None:
        """Follows the other engines."""
        while True:
            await self.look()
            await self._sleep(INTERVAL)

    async def look(self) -> None:
        """Reads the statuses of all engines once; sets what the queue hands to this one."""
        try:
            engines = await self._queue.engines()
        except BackendUnavailable as error:
            logger.warning("redis unavailable, roles not read", extra={"error": str(error)})
            return
        own = self._status()
        # Engines of the other side of a canary take nothing from here.
        of_side = [engine for engine in engines if engine.variant == own.variant]
        others = [engine for engine in of_side if engine.engine_id != own.engine_id]
        self._limit(Fleet.of([own, *others]).bounds(own, self._config.timeout))
        self._room = sum(
            max(0, engine.capacity - engine.running)
            for engine in others
            if engine.takes_work and engine.kv_role != KVRole.PRODUCER
        )
        self.move()

    def _limit(self, bounds: TakeBounds) -> None:
        if bounds != self._bounds:
            alone = bounds == TakeBounds()
            extra = {"role": self._config.role.value, "takes_all": alone}
            logger.info("requests to take have changed", extra=extra)
            self._bounds = bounds
        self._queue.limit(bounds)

    def move(self) -> None:
        """Begins to hand requests over whose prompts are computed, if this engine is a producer."""
        if self._config.role is not KVRole.PRODUCER:
            return
        for key, leased in self._tracker.by_engine_key.items():
            branches = leased.request.sampling.branches
            if branches > self._room:
                return
            if key not in self._moving and _can_move(leased):
                self._room -= branches
                self._moving.add(key)
                self._when_shared(partial(self._begin, key, leased, self._clock()))

    def _when_shared(self, action: Callable[[], None]) -> None:
        """Calls `action` on the event loop once the KV of all full blocks is in the shared tier."""

        def call() -> None:
            self._event_loop.call_soon_threadsafe(action)

        self._loop.between_steps(partial(self._engine.call_when_shared, call))

    def _begin(self, key: str, leased: LeasedRequest, decided_at: float) -> None:
        self._moving.discard(key)
        if self._tracker.by_engine_key.get(key) is leased:
            task = asyncio.create_task(self._give(leased, decided_at))
            self._tasks.add(task)
            task.add_done_callback(self._on_task_done)

    async def _give(self, leased: LeasedRequest, decided_at: float) -> None:
        # The last token's KV is not computed yet.
        tokens = (leased.tokens - 1) // self._block_size * self._block_size
        await self._tracker.give_back([leased], handed_over=True)
        kv_bytes = tokens * self._kv_bytes_per_token
        self._metrics.handed_over(tokens, kv_bytes, self._clock() - decided_at)
        logger.info("request handed over", extra={**leased.log_fields, "tokens": tokens})

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def finish(self) -> None:
        """Waits until the requests that are being given back are in the queue."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.finish()


def _can_move(leased: LeasedRequest) -> bool:
    """Whether the request has a token from here, and the shared tier takes its KV."""
    request = leased.request
    made_token = leased.times.first_token_ns is not None
    shared = request.adapter is None and request.pooling is None and leased.prompt_logprobs is None
    return made_token and shared and not leased.suspect
