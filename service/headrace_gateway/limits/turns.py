"""Lets tenants begin requests in turn, so that many requests of one tenant do not delay others."""

import asyncio
from collections import deque

from .tenant_counts import TenantCounts

# The number of a tenant's requests that begin in one turn of the event loop. Each one occupies the
# loop for about a millisecond, and the first token of another tenant's request takes about ten
# turns. A larger number would send more requests to Redis in one packet.
BEGIN_PER_TURN = 2


class RequestTurns:
    """Lets each tenant begin up to `most` requests in one turn of the event loop; further ones
    wait.

    If only one tenant has requests, they do not wait. All calls must come from one event loop.
    """

    def __init__(self, most: int = BEGIN_PER_TURN) -> None:
        self._most = most
        self._open = TenantCounts()
        self._begun: dict[str, int] = {}
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        self._running = False

    def open(self, tenant: str) -> None:
        """Counts a request of the tenant from before it begins until `close`."""
        self._open.add(tenant)

    def close(self, tenant: str) -> None:
        self._open.remove(tenant)

    def begin(self, tenant: str) -> bool:
        """Begins a request if the tenant may begin one more in this turn; otherwise it must
        `wait`."""
        if len(self._open) == 1 and not self._lines:
            return True
        begun = self._begun.get(tenant, 0)
        if begun >= self._most or tenant in self._lines:
            return False
        self._begun[tenant] = begun + 1
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_soon(self._turn)
        return True

    async def wait(self, tenant: str) -> None:
        """Waits in the tenant's line until the request may begin."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(waiter)
        await waiter

    def _turn(self) -> None:
        self._begun.clear()
        for tenant, line in list(self._lines.items()):
            if begun := self._next(line):
                self._begun[tenant] = begun
            if not line:
                del self._lines[tenant]
        self._running = bool(self._begun)
        if self._running:
            asyncio.get_running_loop().call_soon(self._turn)

    def _next(self, line: deque[asyncio.Future[None]]) -> int:
        begun = 0
        while line and begun < self._most:
            waiter = line.popleft()
            if not waiter.done():  # its task was not cancelled
                waiter.set_result(None)
                begun += 1
        return begun
