"""Values that exporters' threads read through the gateway's event loop."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from headrace_common.errors import BackendUnavailable

LIFETIME_S = 1.0
TIMEOUT_S = 2.0

T = TypeVar("T")


class ScrapeCache(Generic[T]):
    """Keeps one value for all gauges of a scrape.

    If Redis does not answer in time the value is `nothing`, given by the caller, so that the gauges
    show a gap instead of an old value.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[T]],
        nothing: T,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_value = read
        self._nothing = nothing
        self._loop = loop
        self._clock = clock
        self._lock = threading.Lock()
        self._taken_at = -LIFETIME_S
        self._found = nothing

    def current(self) -> T:
        """Returns a value that is at most LIFETIME_S old. Blocks; never call it on the
        loop."""
        with self._lock:
            if self._clock() - self._taken_at >= LIFETIME_S:
                self._found = self._read()
                self._taken_at = self._clock()
            return self._found

    def _read(self) -> T:
        if self._loop.is_closed():
            return self._nothing
        reading = self._read_now()
        try:
            future = asyncio.run_coroutine_threadsafe(reading, self._loop)
        except RuntimeError:  # the loop was closed in the meantime
            reading.close()
            return self._nothing
        try:
            return future.result(TIMEOUT_S)
        except (TimeoutError, asyncio.CancelledError, BackendUnavailable):
            future.cancel()
            return self._nothing

    async def _read_now(self) -> T:
        return await self._read_value()
