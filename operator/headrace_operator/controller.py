"""One task for each ModelService: reconciles when woken, and from time to time unasked.

Events that come while a reconciliation runs make one more, not many. Timers of kopf are not used,
because they put a finalizer on the object: without an operator it could not be deleted then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from .errors import ClusterError

logger = logging.getLogger(__name__)
Key = tuple[str, str]

MAX_BACKOFF = 60.0


class Controller:
    """`interval` seconds between two reconciliations without an event, `gap` at least between any.

    Made and used on one event loop. A reconciliation may take `time_limit` seconds.
    """

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[None]],
        *,
        interval: float,
        gap: float = 1.0,
        time_limit: float = 120.0,
    ) -> None:
        self._reconcile = reconcile
        self._interval = interval
        self._gap = gap
        self._time_limit = time_limit
        self._wakes: dict[Key, asyncio.Event] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    @property
    def keys(self) -> set[Key]:
        return set(self._tasks)

    def wake(self, key: Key) -> None:
        """Reconciles soon; starts looking after the key where it is new."""
        if key not in self._tasks:
            self._wakes[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._look_after(key), name=f"service {key}")
        self._wakes[key].set()

    def nudge(self, key: Key) -> None:
        """As wake, for keys that are known: an event of a child."""
        if key in self._tasks:
            self._wakes[key].set()

    def forget(self, key: Key) -> None:
        self._wakes.pop(key, None)
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Ends every task, in the middle of what it does: the next operator goes on from there."""
        tasks = list(self._tasks.values())
        for key in list(self._tasks):
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_after(self, key: Key) -> None:
        wake = self._wakes[key]
        failures = 0
        while True:
            wake.clear()
            failures = 0 if await self._once(key) else failures + 1
            await asyncio.sleep(self._gap)
            pause = self._interval if failures == 0 else min(MAX_BACKOFF, 2.0**failures)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await wake.wait()

    async def _once(self, key: Key) -> bool:
        """False where it failed and should be tried again sooner, with growing pauses."""
        try:
            async with asyncio.timeout(self._time_limit):
                await self._reconcile(key)
        except (ClusterError, TimeoutError) as error:
            text = str(error) or type(error).__name__
            logger.warning("not reconciled", extra={"model_service": key[1], "error": text})
            return False
        except Exception:  # the edge of this task: one object must not stop the rest
            logger.exception("reconciliation failed", extra={"model_service": key[1]})
            return False
        return True
