"""A task that runs at intervals, and soon after it is woken.

It is level-triggered: the next run does what one run could not do.
"""

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress

SOON = 1.0  # the minimal number of seconds between two runs


class PeriodicTask(ABC):
    """A task that runs at intervals; subclasses define one run."""

    def __init__(self) -> None:
        self._wake = asyncio.Event()

    @abstractmethod
    async def run_once(self) -> None:
        """Does one run. Raises nothing if Redis or the API server does not answer."""

    def wake(self) -> None:
        """Makes the task run soon, after something has changed."""
        self._wake.set()

    async def run(self, interval: float) -> None:
        """Runs every `interval` seconds, and when woken, until it is cancelled."""
        while True:
            self._wake.clear()
            await self.run_once()
            await asyncio.sleep(min(SOON, interval))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wait(interval)):
                    await self._wake.wait()

    def _wait(self, interval: float) -> float:
        """Seconds until the next run if nothing wakes the task."""
        return interval
