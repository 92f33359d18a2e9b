"""What the engines of each model have cached, as far as their KV events tell."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from headrace_common.errors import BackendUnavailable, MessageError
from headrace_common.protocol.kv_events import (
    BlockFilter,
    FollowedFilter,
    KVEventReader,
    decode_event,
)

logger = logging.getLogger(__name__)

LIFETIME_S = 1.0
# Seconds without an event after which an engine's events are read from their begin: Redis may have
# lost some of them, or its clock was set back.
RESTART_S = 60.0


class CachedPrefixes:
    """The filters of the engines of each model, at most LIFETIME_S old."""

    def __init__(self, reader: KVEventReader, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = reader
        self._clock = clock
        self._models: dict[str, _ModelFilters] = {}

    async def filters(self, model: str, engine_ids: Iterable[str]) -> Mapping[str, BlockFilter]:
        """Returns the filters of these engines of a model, without those that are unknown.

        While Redis is unreachable they are those that were read last.
        """
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = _ModelFilters(model, self._reader, self._clock)
        await known.refresh(set(engine_ids))
        return known.filters()


class _ModelFilters:
    """The filters of one model's engines."""

    def __init__(self, model: str, reader: KVEventReader, clock: Callable[[], float]) -> None:
        self._model, self._reader, self._clock = model, reader, clock
        self._engines: dict[str, FollowedFilter] = {}
        self._heard: dict[str, float] = {}  # when an engine's events began or last came
        self._read_at = -LIFETIME_S
        self._reading: asyncio.Task[None] | None = None

    def filters(self) -> dict[str, BlockFilter]:
        return {
            engine: followed.filter
            for engine, followed in self._engines.items()
            if followed.filter is not None
        }

    async def refresh(self, engine_ids: set[str]) -> None:
        """Reads new events if that is due; requests that come meanwhile wait for the same read."""
        if self._reading is None and self._clock() - self._read_at >= LIFETIME_S:
            self._reading = asyncio.create_task(self._read(engine_ids))
        if self._reading is not None:
            await asyncio.wait({self._reading})

    async def _read(self, engine_ids: set[str]) -> None:
        try:
            self._keep(engine_ids)
            after = {engine: followed.last_id for engine, followed in self._engines.items()}
            found = await self._reader.read(self._model, after) if after else {}
            if any(found.values()):
                await asyncio.to_thread(self._follow, found)
        except BackendUnavailable as error:
            logger.debug("KV events not read", extra={"error": str(error)})
        finally:
            self._read_at = self._clock()
            self._reading = None

    def _keep(self, engine_ids: set[str]) -> None:
        """Forgets other engines, and begins anew with those that were not heard of for long."""
        now = self._clock()
        self._engines = {
            engine: self._engines.get(engine) or FollowedFilter() for engine in engine_ids
        }
        self._heard = {engine: self._heard.get(engine, now) for engine in engine_ids}
        for engine, heard in self._heard.items():
            if now - heard >= RESTART_S:
                self._engines[engine].last_id, self._heard[engine] = "", now

    def _follow(self, found: Mapping[str, Sequence[tuple[str, bytes]]]) -> None:
        """Takes over events, in a thread. Unreadable ones make a gap."""
        for engine, events in found.items():
            followed = self._engines[engine]
            for event_id, data in events:
                try:
                    followed.follow(event_id, decode_event(data))
                except MessageError as error:
                    followed.last_id = event_id
                    extra = {"engine_id": engine, "error": str(error)}
                    logger.warning("KV event unreadable, skipped", extra=extra)
                self._heard[engine] = self._clock()
            if followed.filter is None:
                followed.last_id = ""
