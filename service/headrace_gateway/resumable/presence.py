"""Tracks whether a stored request has a client at any gateway.

A request without a client for the length of its window is ended.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace_common.errors import BackendUnavailable, FailureCode
from headrace_common.protocol.failures import CALLED_OFF
from headrace_common.protocol.store import RequestStore, StoredRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Failures after which a request with the same key starts again.
NO_OUTCOME = CALLED_OFF | {FailureCode.LOST, FailureCode.INTERNAL, FailureCode.REMOVED}
# Seconds until Redis is asked again if it was unreachable.
RETRY_S = 1.0


class ClientPresence:
    """The clients of a stored request at this gateway."""

    def __init__(
        self,
        stored: StoredRequest,
        store: RequestStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = 0
        self._stored = stored
        self._store = store
        self._clock = clock
        self._changed = asyncio.Event()

    def join(self) -> None:
        self.count += 1
        self._changed.set()

    def leave(self) -> None:
        self.count -= 1
        self._changed.set()

    async def present(self) -> None:
        """Returns once there is a client here."""
        while not self.count:
            await self._wait_for_change()

    async def lost(self) -> None:
        """Tells other gateways while a client is here; returns once no gateway has had a client for
        the window."""
        window = self._stored.window
        while True:
            told = await self._unless_redis_is_away(self._tell())
            if self.count:
                pause = RETRY_S if told is None else window / 3
                await self._wait_until(pause, lambda: not self.count)
            elif await self._abandoned():
                return

    async def _tell(self) -> bool:
        await self._store.set_presence(self._stored.request_id, self._stored.window)
        return True

    async def _abandoned(self) -> bool:
        """Waits until a client comes (returns False) or no gateway has one (returns True)."""
        # What Redis knows of this gateway's last client may be missing or lost.
        end = self._clock() + self._stored.window
        while not self.count:
            left = await self._unless_redis_is_away(
                self._store.presence_left(self._stored.request_id)
            )
            left = max(RETRY_S if left is None else left, end - self._clock())
            if left <= 0 and not self.count:
                return True
            await self._wait_until(left, lambda: self.count > 0)
        return False

    async def _wait_until(self, seconds: float, until: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not until():
                    await self._wait_for_change()
        except TimeoutError:
            return

    async def _wait_for_change(self) -> None:
        """Waits for the next change.

        All waiters share the event, so it is replaced instead of cleared.
        """
        changed = self._changed
        if changed.is_set():
            changed = self._changed = asyncio.Event()
        await changed.wait()

    async def _unless_redis_is_away(self, work: Awaitable[T]) -> T | None:
        """Awaits `work`; returns None if Redis is unreachable."""
        try:
            return await work
        except BackendUnavailable as error:
            extra = {"request_id": self._stored.request_id, "error": str(error)}
            logger.warning(
                "redis unavailable, not known whether a stored request has clients", extra=extra
            )
            return None
