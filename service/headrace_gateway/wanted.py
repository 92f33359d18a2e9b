"""How long a kept request has a client, at this gateway or another: who has had none for its window
is not wanted any more."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from headrace_common.errors import BackendUnavailable, FailureCode
from headrace_common.protocol.failures import CALLED_OFF
from headrace_common.protocol.store import RequestStore, StoredRequest

logger = logging.getLogger(__name__)

# Endings after which the same key starts anew: nothing was decided by them.
NO_OUTCOME = CALLED_OFF | {FailureCode.LOST, FailureCode.INTERNAL}
# While Redis is away nobody can say that a client is there: ask again after so many seconds.
UNCLEAR_S = 1.0


class Readers:
    """A kept request's clients at this gateway."""

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
        """Returns once there is one."""
        while not self.count:
            await self._change()

    async def lost(self) -> None:
        """Tells other gateways while a reader is here; returns when nobody has wanted it."""
        window = self._stored.window
        while True:
            await self._quietly(self._store.want(self._stored.request_id, window))
            if self.count:
                await self._wait(window / 3, lambda: not self.count)
            elif await self._unwanted():
                return

    async def _unwanted(self) -> bool:
        """Waits until a reader comes, or nobody wants it; returns whether that is so."""
        while not self.count:
            left = await self._quietly(self._store.wanted(self._stored.request_id))
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
        """The event is one object for all who wait: it is replaced, not cleared, at each change."""
        changed = self._changed
        if changed.is_set():
            changed = self._changed = asyncio.Event()
        await changed.wait()

    async def _quietly(self, work: Awaitable[float | None]) -> float | None:
        try:
            return await work
        except BackendUnavailable as error:
            extra = {"request_id": self._stored.request_id, "error": str(error)}
            logger.warning("redis unavailable, readers unknown", extra=extra)
            return None
