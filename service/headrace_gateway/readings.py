"""What exporters' threads read through the gateway's event loop."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from headrace_common.errors import BackendUnavailable

READING_LIFETIME_S = 1.0
READING_TIMEOUT_S = 2.0

T = TypeVar("T")


class Readings(Generic[T]):
    """A reading serves all gauges of one scrape. Where Redis does not answer in time it is
    `nothing`, so that the gauges show a gap and not an old value."""

    def __init__(
        self,
        read: Callable[[], Awaitable[T]],
        nothing: T,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reading = read
        self._nothing = nothing
        self._loop = loop
        self._clock = clock
        self._lock = threading.Lock()
        self._taken_at = -READING_LIFETIME_S
        self._found = nothing

    def current(self) -> T:
        """At most READING_LIFETIME_S old. Blocks; never call it on the loop."""
        with self._lock:
            if self._clock() - self._taken_at >= READING_LIFETIME_S:
                self._found = self._read()
                self._taken_at = self._clock()
            return self._found

    def _read(self) -> T:
        if self._loop.is_closed():
            return self._nothing
        reading = self._read_now()
        try:
            future = asyncio.run_coroutine_threadsafe(reading, self._loop)
        except RuntimeError:  # the loop was closed meanwhile
            reading.close()
            return self._nothing
        try:
            return future.result(READING_TIMEOUT_S)
        except (TimeoutError, asyncio.CancelledError, BackendUnavailable):
            future.cancel()
            return self._nothing

    async def _read_now(self) -> T:
        return await self._reading()
