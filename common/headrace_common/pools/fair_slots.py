"""Slots for work, shared fairly: a tenant that fills its share waits without delaying others."""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SlotsFull(Exception):
    """Too much work waits, or has waited too long.

    `tenant` says that the tenant's own limit is reached.
    """

    def __init__(self, *, tenant: bool) -> None:
        super().__init__("the tenant's limit" if tenant else "the limit of all tenants")
        self.tenant = tenant


class FairSlots:
    """`slots` slots; one tenant holds at most all but one of them. Use it on one event loop.

    Waiting tenants are served in turn. At most `most` callers wait, `most_of_tenant` of them of one
    tenant; None: any number.
    """

    def __init__(
        self, slots: int, *, most: int | None = None, most_of_tenant: int | None = None
    ) -> None:
        self._slots = slots
        self._of_tenant = max(1, slots - 1)
        self._most = math.inf if most is None else most
        self._most_of_tenant = math.inf if most_of_tenant is None else most_of_tenant
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def tenants(self) -> int:
        """The number of tenants that hold a slot or wait for one."""
        return len(self._held.keys() | self._waiting.keys())

    @asynccontextmanager
    async def hold(self, tenant: str, max_wait: float | None = None) -> AsyncIterator[None]:
        """Holds a slot within the block; waits at most `max_wait` seconds. Raises SlotsFull."""
        try:
            async with asyncio.timeout(max_wait):
                await self.enter(tenant)
        except TimeoutError as error:
            raise SlotsFull(tenant=self._held[tenant] >= self._of_tenant) from error
        try:
            yield
        finally:
            self.leave(tenant)

    async def enter(self, tenant: str) -> None:
        """Takes a slot, once one is free; `leave` gives it back. Raises SlotsFull."""
        if self._may_enter(tenant):
            self._held[tenant] += 1
            return
        waiter = self._queue(tenant)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # it got a slot meanwhile
                self.leave(tenant)
            else:
                self._remove(tenant, waiter)
            raise

    def _may_enter(self, tenant: str) -> bool:
        return self._held.total() < self._slots and self._held[tenant] < self._of_tenant

    def _queue(self, tenant: str) -> asyncio.Future[None]:
        own = self._waiting.get(tenant, ())
        if len(own) >= self._most_of_tenant:
            raise SlotsFull(tenant=True)
        if sum(map(len, self._waiting.values())) >= self._most:
            raise SlotsFull(tenant=False)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(waiter)
        return waiter

    def _remove(self, tenant: str, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiting.get(tenant, deque())
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[tenant]

    def leave(self, tenant: str) -> None:
        """Gives back a slot; the next waiting tenant gets it."""
        self._held[tenant] -= 1
        self._held = +self._held
        while (following := next(filter(self._may_enter, self._waiting), None)) is not None:
            waiters = self._waiting.pop(following)
            waiter = waiters.popleft()
            if waiters:  # its next caller comes after those of other tenants
                self._waiting[following] = waiters
            if not waiter.cancelled():
                self._held[following] += 1
                waiter.set_result(None)
                return
