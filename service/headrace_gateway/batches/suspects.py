"""Lines that may be what took gateways down: they are counted where all gateways see it.

A leader notes each line before it starts it. A note of a gateway that leads the batch no longer,
and has not left it to others itself, says that this gateway ended while the line ran.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.batches import Batch
from headrace_common.protocol.redis_batches import RedisBatches

# A line is not run again once this many gateways ended while it ran, and from ALONE_FROM on it
# runs without any other line of its gateway, so that only what it does itself is counted.
MAX_GATEWAYS = 3
ALONE_FROM = 2
# Stand for the batch's own files beside its lines, which are numbered from 1.
READING, WRITING = 0, -1


class Suspects:
    """Which lines of a batch ran in gateways that ended, as this leader found them."""

    def __init__(self, batches: RedisBatches, batch: Batch, leader: str) -> None:
        self._batches = batches
        self._batch = batch
        self._leader = leader
        self._found: Mapping[int, frozenset[str]] = {}
        self._started: set[int] = set()

    async def load(self) -> None:
        """Reads what earlier leaders have noted; this one has not ended."""
        found = await self._batches.starters(self._batch)
        own = [line for line, leaders in found.items() if self._leader in leaders]
        await self._batches.unstart(self._batch, own, [self._leader])
        self._found = {line: leaders - {self._leader} for line, leaders in found.items()}

    def gateways(self, line: int) -> int:
        """The number of gateways that ended while the line ran."""
        return len(self._found.get(line, ()))

    @asynccontextmanager
    async def started(self, line: int) -> AsyncIterator[None]:
        """The line runs within the block; what earlier leaders have noted stays."""
        self._started.add(line)
        await self._batches.start(self._batch, line, self._leader)
        yield
        await self._batches.unstart(self._batch, [line], [self._leader])
        self._started.discard(line)

    def starters(self, line: int) -> frozenset[str]:
        """All that is noted of a line, to be forgotten once it has its result."""
        return self._found.get(line, frozenset()) | {self._leader}

    async def cleared(self, line: int) -> None:
        """The line is innocent."""
        await self._batches.unstart(self._batch, [line], self.starters(line))

    async def leave(self) -> None:
        """This gateway stops leading, and has not ended: what it started counts for nothing."""
        try:
            await self._batches.unstart(self._batch, self._started, [self._leader])
        except BackendUnavailable:
            return  # it counts as one that ended


class Turns:
    """Lines of all batches of this gateway run together, but a suspect without any other."""

    def __init__(self) -> None:
        self._running = 0
        self._alone = False
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._alone)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._tell()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._alone)
        self._alone = True
        try:
            await self._until(lambda: self._running == 0)
            yield
        finally:
            self._alone = False
            self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()
