"""Tells gateways which KV blocks the engine has cached, at most every INTERVAL seconds.

Requests are placed by it. Nothing else depends on it: what is told may be late or lost.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from headrace_common.errors import BackendUnavailable, HeadraceError
from headrace_common.protocol.kv_events import (
    MAX_CHANGES,
    MAX_EVENTS,
    BlockFilter,
    KVEvent,
    KVEventWriter,
)
from headrace_common.wire import keys

from ..kv_cache.cached_blocks import CachedBlocks

logger = logging.getLogger(__name__)

INTERVAL = 0.5
RENEWAL = keys.KV_EVENTS_TTL_MS / 3000  # seconds without changes after which the events are renewed
REFUSED_PAUSE = 60.0  # seconds after which an engine that may not write its events tries again


class KVEventReporter:
    """Writes the changes of `cached`, and from time to time the whole filter."""

    def __init__(
        self,
        cached: CachedBlocks,
        writer: KVEventWriter,
        block_size: int,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._cached = cached
        self._writer = writer
        self._filter = BlockFilter(cached.bits, block_size)
        self._pause = sleep
        self._number = 0
        self._since_whole = MAX_EVENTS  # events, so that the first one is whole
        self._changes_since_whole = 0
        self._news = asyncio.Event()

    def notify(self) -> None:
        """Says that the engine has made a step."""
        if self._cached.has_changes:
            self._news.set()

    async def keep(self) -> None:
        """Reports changes without end."""
        while True:
            try:
                await self.report()
            except BackendUnavailable as error:
                self._since_whole = MAX_EVENTS
                logger.debug("KV events not written", extra={"error": str(error)})
            except HeadraceError as error:  # the Redis user of an older chart may not write them
                self._since_whole = MAX_EVENTS
                logger.warning("no KV events for placement", extra={"error": str(error)})
                await self._pause(REFUSED_PAUSE)
            await self._pause(INTERVAL)
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEWAL):
                    await self._news.wait()

    async def report(self) -> None:
        """Writes what has changed since the last report. Raises BackendUnavailable."""
        self._news.clear()
        changes = self._cached.take_changes()
        added = [position for position, is_set in changes.items() if is_set]
        removed = [position for position, is_set in changes.items() if not is_set]
        self._filter.change(added, removed)
        if self._needs_whole(len(changes)):
            await self._write_whole()
        elif not changes:
            if not await self._writer.renew():
                await self._write_whole()
        elif not await self._write(added=added, removed=removed):
            await self._write_whole()

    def _needs_whole(self, changes: int) -> bool:
        """Whether the changes are too many for an event, or those since the last whole filter are
        too many for a reader that begins."""
        self._changes_since_whole += changes
        within = self._changes_since_whole <= max(MAX_CHANGES, 2**self._filter.bits // 32)
        return changes > MAX_CHANGES or self._since_whole >= MAX_EVENTS - 1 or not within

    async def _write_whole(self) -> None:
        self._since_whole = MAX_EVENTS  # until it is written
        await self._write(whole=self._filter.whole)
        self._since_whole = self._changes_since_whole = 0

    async def _write(
        self,
        *,
        whole: bytes | None = None,
        added: list[int] | None = None,
        removed: list[int] | None = None,
    ) -> bool:
        self._number += 1
        self._since_whole += 1
        return await self._writer.write(
            KVEvent(
                number=self._number,
                block_size=self._filter.block_size,
                bits=self._filter.bits,
                whole=whole,
                added=added or (),
                removed=removed or (),
            )
        )
