"""Reads the live data for all consoles of this gateway, only while at least one watches.

One task reads for all watchers. A watcher that is slower than the data misses views.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import EngineStatus, QueueDepth
from headrace_common.protocol.live import EngineSight, LiveStore, ModelSight

from ..errors import ApiError
from ..models.models import Models
from ..queue_client.engines import EngineDirectory
from ..queue_client.request_history import RequestHistory
from .live_view import EngineView, LiveView, ModelView

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25
# The largest share of time that reading may take: if reads take long, they become less frequent.
MAX_SHARE = 0.2
QUIET_S = 2.0
WATCH_EVERY_S = 1.0
MAX_WATCHERS, MAX_TENANT_WATCHERS = 16, 4
MAX_MODELS, MAX_ENGINES = 64, 64
RETRY_AFTER_S = 10.0


class Depths(Protocol):
    """The part of a GatewayQueue that counts waiting requests."""

    async def depth(self, model: str) -> QueueDepth: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSources:
    """Where the data comes from. Without `store` there are only heartbeats. `clock` is Redis'.

    `history` is told what engines' snapshots say about this gateway's requests.
    """

    models: Models
    engines: EngineDirectory
    depths: Depths
    store: LiveStore | None
    clock: Callable[[], float]
    history: RequestHistory | None = None


class LiveFeed:
    """The latest view. Use from one event loop."""

    def __init__(
        self, sources: LiveSources, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._sources = sources
        self._monotonic = monotonic
        self._watchers: Counter[str] = Counter()
        self._reading: asyncio.Task[None] | None = None
        self._view = LiveView(time=0.0)
        self._version = 0
        self._published = asyncio.Condition()
        self._asked_at = 0.0
        self._since = 0.0  # the time when watching began, by Redis' clock

    @property
    def tenants(self) -> Sequence[str]:
        """The tenants that watch now."""
        return list(self._watchers)

    @contextmanager
    def watching(self, tenant: str) -> Iterator[None]:
        """Counts a watcher. Raises ApiError if there are too many."""
        if self._watchers[tenant] >= MAX_TENANT_WATCHERS:
            raise _too_many(f"{MAX_TENANT_WATCHERS} of its tenant")
        if self._watchers.total() >= MAX_WATCHERS:
            raise _too_many(f"{MAX_WATCHERS} in all")
        self._watchers[tenant] += 1
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_on(), name="console")
        try:
            yield
        finally:
            self._watchers -= Counter({tenant: 1})
            if not self._watchers:
                self._stop()

    async def after(self, version: int) -> tuple[int, LiveView]:
        """Waits for a view that is newer than `version` (0: any); returns it with its version."""
        async with self._published:
            await self._published.wait_for(lambda: self._version > version)
            return self._version, self._view

    def _stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None
        self._view, self._version = LiveView(time=0.0), 0  # the next watcher waits for a new view

    async def _read_on(self) -> None:
        published_at = -QUIET_S
        self._since = self._sources.clock() - INTERVAL_S
        while True:
            begun = self._monotonic()
            view = await self._read()
            now = self._monotonic()
            if view != self._view or now - published_at >= QUIET_S:
                published_at = now
                await self._publish(view)
            await asyncio.sleep(max(INTERVAL_S - (now - begun), (now - begun) / MAX_SHARE))

    async def _publish(self, view: LiveView) -> None:
        async with self._published:
            self._view, self._version = view, self._version + 1
            self._published.notify_all()

    async def _read(self) -> LiveView:
        now = self._sources.clock()
        names = self._sources.models.queues[:MAX_MODELS]
        try:
            found = await asyncio.gather(*map(self._read_model, names))
            await self._ask_engines([engine for _, engines in found for engine in engines])
        except BackendUnavailable as error:
            logger.warning("redis unavailable, console not updated", extra={"error": str(error)})
            return replace(self._view, time=now, stale=True)
        except Exception:
            logger.exception("console not updated")
            return replace(self._view, time=now, stale=True)
        engines = [engine for _, engines in found for engine in engines]
        return LiveView(
            time=now,
            models=tuple(model for model, _ in found),
            engines=tuple(engines[:MAX_ENGINES]),
            engines_left_out=max(0, len(engines) - MAX_ENGINES),
        )

    async def _read_model(self, name: str) -> tuple[ModelView, list[EngineView]]:
        sources = self._sources
        statuses, depth = await asyncio.gather(
            sources.engines.engines(name), sources.depths.depth(name)
        )
        sight = await self._sight(name, statuses[:MAX_ENGINES])
        view = ModelView(
            name=name,
            depth=replace(depth, oldest_age=0.0),
            oldest_wait=depth.oldest_age,
            scaling=sight.decision,
            starts=sight.starts,
        )
        sights = [*sight.engines, *[EngineSight()] * len(statuses)]
        pairs = zip(statuses, sights, strict=False)
        return view, [EngineView(status=status, sight=one) for status, one in pairs]

    async def _sight(self, model: str, statuses: Sequence[EngineStatus]) -> ModelSight:
        store = self._sources.store
        if store is None:
            return ModelSight(engines=())
        sight = await store.read(model, [status.engine_id for status in statuses])
        engines = tuple(map(self._since_watched, sight.engines))
        for status, engine in zip(statuses, engines, strict=True):
            self._note(status.engine_id, engine)
        return replace(sight, engines=engines)

    def _note(self, engine_id: str, sight: EngineSight) -> None:
        history = self._sources.history
        if history is None or sight.snapshot is None or sight.age > INTERVAL_S * 2:
            return
        for sequence in sight.snapshot.sequences:
            timeline = history.find(sequence.tenant, sequence.request_id)
            if timeline is not None:
                preempted = sequence.state in ("preempted", "swapped")
                timeline.seen(engine_id, sequence.age, preempted=preempted)

    def _since_watched(self, sight: EngineSight) -> EngineSight:
        """Leaves out a snapshot for an earlier watcher: its age says nothing about the engine."""
        old = sight.snapshot is not None and sight.snapshot.time < self._since
        return EngineSight(age=sight.age) if old else sight

    async def _ask_engines(self, engines: Sequence[EngineView]) -> None:
        """Asks the engines for snapshots, which they write for the next seconds."""
        store, now = self._sources.store, self._monotonic()
        if store is None or now - self._asked_at < WATCH_EVERY_S:
            return
        self._asked_at = now
        asked: dict[str, list[str]] = {}
        for engine in engines[:MAX_ENGINES]:
            if engine.status.shows_batch:
                asked.setdefault(engine.status.model, []).append(engine.status.engine_id)
        await asyncio.gather(*(store.watch(model, ids) for model, ids in asked.items()))


def _too_many(bound: str) -> ApiError:
    return ApiError(
        429,
        f"This gateway streams to as many consoles as it may, {bound}. Close one.",
        kind="rate_limit_error",
        code="too_many_watchers",
        retry_after=RETRY_AFTER_S,
    )
