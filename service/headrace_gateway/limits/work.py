"""Threads for work that grows with a request; no tenant can use all of them.

A long call into C that holds the GIL blocks the event loop even from a thread, so the budget bounds
such calls. The event loop runs between them.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from headrace_common.pools.fair_slots import FairSlots

Result = TypeVar("Result")

# Work on this many characters or bytes takes about a millisecond, no more than using a thread.
INLINE_SIZE = 4096
# Seconds for which a thread that runs Python keeps the GIL while the event loop waits for it.
# Python's default is ten times as long, and a request needs the event loop some ten times.
GIL_SLICE_S = 0.0005


def prefer_event_loop() -> None:
    """Lets the event loop interrupt threads that work on large requests sooner than by default."""
    sys.setswitchinterval(GIL_SLICE_S)


def size_of(value: object) -> int:
    """Counts characters and items of JSON-like data; stops counting above INLINE_SIZE."""
    size, left = 0, [value]
    while left and size <= INLINE_SIZE:
        part = left.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, Mapping):
            size += len(part)
            left.extend(part.values())
        elif isinstance(part, list | tuple):
            size += len(part)
            left.extend(part)
    return size


class WorkPool:
    """Shares the threads of an executor between tenants; one tenant has at most all but one."""

    def __init__(self, executor: Executor, threads: int) -> None:
        self._executor = executor
        self._slots = FairSlots(threads)

    def of(self, tenant: str) -> "Work":
        return Work(self, tenant)

    @property
    def tenants(self) -> int:
        """The number of tenants whose work runs or waits."""
        return self._slots.tenants

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Runs work in a thread, once one is free for the tenant. The thread finishes the work even
        if the caller is cancelled.
        """
        await self._slots.enter(tenant)
        loop = asyncio.get_running_loop()
        future = self._executor.submit(work)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._slots.leave, tenant))
        return await asyncio.wrap_future(future)


@dataclass(frozen=True, slots=True)
class Work:
    """One tenant's access to the threads."""

    _pool: WorkPool
    tenant: str

    def of(self, tenant: str) -> "Work":
        """Returns another tenant's access."""
        return Work(self._pool, tenant)

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """Runs work in a thread; small work (`size` in characters or bytes) runs at once."""
        return work() if size <= INLINE_SIZE else await self._pool.run(self.tenant, work)
