"""Threads for work that grows with a request; no tenant can use all of them.

A long call into C that holds the GIL blocks the event loop even from a thread, so the budget bounds
such calls. The event loop runs between them.
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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


class Abandoned(Exception):
    """No caller waits for the result of this work."""


class _Job(Generic[Result]):
    """Work in a thread."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self.abandoned = False

    def __call__(self) -> Result:
        _thread.job = self
        try:
            return self._work()
        finally:
            _thread.job = None


class _Thread(threading.local):
    """The job that this thread runs."""

    job: _Job[Any] | None = None


_thread = _Thread()


def check_wanted() -> None:
    """Raises Abandoned if this thread's work is not wanted any more.

    Long work calls it between its pieces.
    """
    if _thread.job is not None and _thread.job.abandoned:
        raise Abandoned


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
        """Runs work in a thread, once one is free for the tenant.

        If the caller is cancelled, the thread continues until the work calls `check_wanted`.
        """
        await self._slots.enter(tenant)
        loop = asyncio.get_running_loop()
        job = _Job(work)
        future = self._executor.submit(job)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._slots.leave, tenant))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            job.abandoned = True
            raise


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
