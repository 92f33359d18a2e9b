"""One task for each ModelService, which reconciles when woken and at intervals.

Events during a reconciliation cause one more, not many. kopf's timers are not used, because they
put a finalizer on the object, which then could not be deleted without an operator.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ..errors import ClusterError

logger = logging.getLogger(__name__)
Key = tuple[str, str]

MAX_BACKOFF = 60.0


class Controller:
    """The tasks of all ModelServices. Create and use it on one event loop.

    Without an event a ModelService is reconciled every `interval` seconds, counted from start to
    start, or earlier if its last reconciliation asks for it; `gap` seconds are the minimum from the
    end of one to the start of the next. A reconciliation may take `time_limit` seconds.
    """

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[float | None]],
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
        """Reconciles soon; starts a task if the key is new."""
        if key not in self._tasks:
            self._wakes[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._look_after(key), name=f"service {key}")
        self._wakes[key].set()

    def nudge(self, key: Key) -> None:
        """Wakes a known key because of an event of a child object; ignores other keys."""
        if key in self._tasks:
            self._wakes[key].set()

    def forget(self, key: Key) -> None:
        self._wakes.pop(key, None)
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Ends every task immediately; the next operator continues from there."""
        tasks = list(self._tasks.values())
        for key in list(self._tasks):
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_after(self, key: Key) -> None:
        wake = self._wakes[key]
        clock = asyncio.get_running_loop().time
        failures = 0
        while True:
            wake.clear()
            started = clock()
            pause = await self._once(key)
            failures = failures + 1 if pause is None else 0
            due = clock() + min(MAX_BACKOFF, 2.0**failures) if pause is None else started + pause
            await asyncio.sleep(self._gap)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await wake.wait()

    async def _once(self, key: Key) -> float | None:
        """Reconciles once; returns the seconds until the next time.

        None if it failed; it is then repeated with growing pauses.
        """
        try:
            async with asyncio.timeout(self._time_limit):
                soon = await self._reconcile(key)
        except (ClusterError, TimeoutError) as error:
            text = str(error) or type(error).__name__
            logger.warning(
                "not reconciled, tried again", extra={"model_service": key[1], "error": text}
            )
            return None
        except Exception:  # one object must not stop the others
            logger.exception(
                "reconciliation failed by a bug, tried again", extra={"model_service": key[1]}
            )
            return None
        return self._interval if soon is None else min(soon, self._interval)
