"""Whether the engine is to sleep, and whether it does.

The worker asks here what is wanted, and calls `fall_asleep` and `wake` while nothing runs. The
engine's thread gives the memory back and takes it again, between two steps.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from ..core.config import SleepLevel
from ..core.stats import SchedulerStats
from ..engine.engine import Engine
from ..engine.engine_loop import EngineLoop

logger = logging.getLogger(__name__)


class Sleeper:
    """The sleep of one engine. Used on the event loop, except `level` and `moving`.

    `wanted` is the level that is wanted, None for awake; `level` is that of the engine. Running
    requests have `timeout` seconds to end before it falls asleep. `moving` says that the engine
    falls asleep or wakes. `on_wanted` is called when `wanted` has changed.
    """

    def __init__(
        self, engine: Engine, loop: EngineLoop, on_wanted: Callable[[], None], timeout: float
    ) -> None:
        self._engine, self._loop = engine, loop
        self._on_wanted = on_wanted
        self._timeout = self.timeout = timeout
        self._changed = asyncio.Event()
        self.wanted: SleepLevel | None = None
        self.level: SleepLevel | None = None
        self.moving = False

    async def sleep(self, level: SleepLevel, patience: float | None = None) -> bool:
        """Makes the engine sleep, and waits until it does; returns whether it does at this level.

        `patience` replaces the default for `timeout`.
        It does not if a later call wanted something else, or if it slept already at another level.
        """
        self.ask(level, patience)
        while self.wanted is not None and self.level is None:
            await self._change()
        return self.level == level

    async def wake_up(self) -> bool:
        """Wakes the engine, and waits until it is awake; returns whether it is."""
        self.ask(None)
        while self.wanted is None and self.level is not None:
            await self._change()
        return self.level is None

    def ask(self, level: SleepLevel | None, timeout: float | None = None) -> None:
        """Says what is wanted, and does not wait. Of two levels the first one stays."""
        if level is not None and self.wanted is not None:
            return
        self.timeout = self._timeout if timeout is None else timeout
        if level != self.wanted:
            self.wanted = level
            self._on_wanted()
            self._changed.set()

    async def fall_asleep(self, level: SleepLevel) -> SchedulerStats:
        """Gives the engine's memory back; returns its statistics. No request is left by then."""
        begun = time.monotonic()
        stats = await self._between_steps(lambda: self._engine.sleep(level))
        self._set(level)
        seconds = round(time.monotonic() - begun, 3)
        logger.info("engine asleep", extra={"level": level, "seconds": seconds})
        return stats

    async def wake(self) -> None:
        """Takes the engine's memory again."""
        begun = time.monotonic()
        await self._between_steps(self._engine.wake_up)
        self._set(None)
        logger.info("engine awake", extra={"seconds": round(time.monotonic() - begun, 3)})

    async def _between_steps(self, action: Callable[[], None]) -> SchedulerStats:
        """Calls `action` in the engine's thread; an error of it ends the engine."""
        event_loop = asyncio.get_running_loop()
        done: asyncio.Future[SchedulerStats] = event_loop.create_future()

        def act() -> None:
            action()
            event_loop.call_soon_threadsafe(_resolve, done, self._engine.stats())

        self.moving = True
        try:
            self._loop.between_steps(act)
            return await done
        finally:
            self.moving = False

    def _set(self, level: SleepLevel | None) -> None:
        self.level = level
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _resolve(done: "asyncio.Future[SchedulerStats]", stats: SchedulerStats) -> None:
    if not done.done():
        done.set_result(stats)
