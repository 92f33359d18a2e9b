"""Counts, in Redis, the gateways that ended while a line of a batch ran.

A leader notes each line before it starts it. A note of a gateway that no longer leads the batch,
and did not hand it over, means that this gateway ended while the line ran.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.batches import Batch
from headrace_common.protocol.redis.batches import RedisBatches

# A line is not run again once this many gateways ended while it ran. From ALONE_FROM on it runs
# without any other line of its gateway, so that only its own effects are counted.
MAX_GATEWAYS = 3
ALONE_FROM = 2
# Used like a line's number while the batch's own files are read or written; lines begin at 1.
READING_INPUT, WRITING_RESULTS = 0, -1


class CrashCounts:
    """The crash counts of a batch's lines, from the notes that this leader found."""

    def __init__(self, batches: RedisBatches, batch: Batch, leader: str) -> None:
        self._batches = batches
        self._batch = batch
        self._leader = leader
        self._found: Mapping[int, frozenset[str]] = {}
        self._started: set[int] = set()

    async def load(self) -> None:
        """Reads the notes of earlier leaders; this gateway's own notes are removed."""
        found = await self._batches.starters(self._batch)
        own = [line for line, leaders in found.items() if self._leader in leaders]
        await self._batches.unstart(self._batch, own, [self._leader])
        self._found = {line: leaders - {self._leader} for line, leaders in found.items()}

    def gateways(self, line: int) -> int:
        """Returns the number of gateways that ended while the line ran."""
        return len(self._found.get(line, ()))

    @asynccontextmanager
    async def started(self, line: int) -> AsyncIterator[None]:
        """Records in Redis that the line runs within the block; notes of earlier leaders stay."""
        self._started.add(line)
        await self._batches.start(self._batch, line, self._leader)
        yield
        await self._batches.unstart(self._batch, [line], [self._leader])
        self._started.discard(line)

    def starters(self, line: int) -> frozenset[str]:
        """Returns the gateways that have a note of this line.

        Storing the line's result deletes the notes.
        """
        return self._found.get(line, frozenset()) | {self._leader}

    async def cleared(self, line: int) -> None:
        """Removes all notes of a line after it ran without ending its gateway."""
        await self._batches.unstart(self._batch, [line], self.starters(line))

    async def leave(self) -> None:
        """Removes this gateway's notes: it hands the batch over."""
        try:
            await self._batches.unstart(self._batch, self._started, [self._leader])
        except BackendUnavailable:
            return  # this gateway then counts as one that ended


class SharedExclusiveLock:
    """Lets lines of all batches of this gateway run together, but a suspect line alone."""

    def __init__(self) -> None:
        self._shared = 0
        self._exclusive = False
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._exclusive)
        self._shared += 1
        try:
            yield
        finally:
            self._shared -= 1
            self._notify()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._exclusive)
        self._exclusive = True
        try:
            await self._until(lambda: self._shared == 0)
            yield
        finally:
            self._exclusive = False
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()
