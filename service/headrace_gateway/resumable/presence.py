"""Watches whether a stored request has a client, at any gateway; without one for its window it
ends."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from headrace_common.errors import BackendUnavailable, FailureCode
from headrace_common.protocol.failures import CALLED_OFF
from headrace_common.protocol.store import RequestStore, StoredRequest

logger = logging.getLogger(__name__)

# Endings that decide nothing: the same key then starts anew.
NO_OUTCOME = CALLED_OFF | {FailureCode.LOST, FailureCode.INTERNAL, FailureCode.REMOVED}
# While Redis is away it is not known whether a client is there: seconds until the next attempt.
UNCLEAR_S = 1.0


class ClientPresence:
    """The clients of a stored request at this gateway."""

    def __init__(self, stored: StoredRequest, store: RequestStore) -> None:
        self.count = 0
        self._stored = stored
        self._store = store
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
            await self._change()

    async def lost(self) -> None:
        """Tells other gateways while a client is here; returns when no gateway has had one."""
        window = self._stored.window
        while True:
            await self._quietly(self._store.set_presence(self._stored.request_id, window))
            if self.count:
                await self._wait(window / 3, lambda: not self.count)
            elif await self._unwanted():
                return

    async def _unwanted(self) -> bool:
        """Waits until a client comes, or no gateway has one; returns whether the latter is so."""
        while not self.count:
            left = await self._quietly(self._store.presence_left(self._stored.request_id))
            if left == 0:
                return True
            await self._wait(UNCLEAR_S if left is None else left, lambda: self.count > 0)
        return False

    async def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not until():
                    await self._change()
        except TimeoutError:
            return

    async def _change(self) -> None:
        """Waits for the next change. The event is shared by all waiters: it is replaced, not
        cleared."""
        changed = self._changed
        if changed.is_set():
            changed = self._changed = asyncio.Event()
        await changed.wait()

    async def _quietly(self, work: Awaitable[float | None]) -> float | None:
        try:
            return await work
        except BackendUnavailable as error:
            extra = {"request_id": self._stored.request_id, "error": str(error)}
            logger.warning(
                "redis unavailable, not known whether a stored request has clients", extra=extra
            )
            return None
