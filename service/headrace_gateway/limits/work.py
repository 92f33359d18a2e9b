"""Threads for work that grows with a request, of which no tenant has all.

A thread does not free the event loop from one long call into C that keeps the interpreter's lock:
the budget bounds each of those. It does so between such calls.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

Result = TypeVar("Result")

# Work on so much text, or as many bytes, takes about a millisecond: no more than a thread costs.
INLINE_SIZE = 4096


def size_of(value: object) -> int:
    """Characters and items of JSON-like data; where they are many, not all of them are counted."""
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


@dataclass(slots=True)
class _Share:
    """What one tenant has of the threads. `users` run or wait."""

    free: asyncio.Semaphore
    users: int = 0


@dataclass(slots=True)
class WorkPool:
    """`executor` has more threads than the `most` that one tenant may keep busy."""

    executor: Executor
    most: int
    _shares: dict[str, _Share] = field(default_factory=dict)

    def of(self, tenant: str) -> "Work":
        return Work(self, tenant)

    @property
    def tenants(self) -> int:
        """Those for which something runs or waits."""
        return len(self._shares)

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """In a thread, once the tenant has one to spare. Cancelled, the thread ends its work."""
        share = self._shares.setdefault(tenant, _Share(asyncio.Semaphore(self.most)))
        share.users += 1
        try:
            await share.free.acquire()
        except BaseException:
            self._leave(tenant, share)
            raise
        loop = asyncio.get_running_loop()

        def done(_: object) -> None:
            share.free.release()
            self._leave(tenant, share)

        future = self.executor.submit(work)
        future.add_done_callback(lambda ended: loop.call_soon_threadsafe(done, ended))
        return await asyncio.wrap_future(future)

    def _leave(self, tenant: str, share: _Share) -> None:
        share.users -= 1
        if not share.users:
            self._shares.pop(tenant, None)


@dataclass(frozen=True, slots=True)
class Work:
    """One tenant's way to the threads."""

    _pool: WorkPool
    _tenant: str

    def of(self, tenant: str) -> "Work":
        """Another tenant's."""
        return Work(self._pool, tenant)

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """`size` in characters or bytes; small work is done at once."""
        return work() if size <= INLINE_SIZE else await self._pool.run(self._tenant, work)
