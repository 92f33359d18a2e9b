"""The batches of a simulation: their requests that are not in the queue yet, and their pace."""

from collections import deque
from math import inf
from operator import sub

from headrace_common.protocol.batches import is_behind

from .workload import Trace

CONCURRENCY = 32
"""Requests of one batch that are in the queue at once; the gateway's default."""


class BatchLines:
    """The requests of all batches, in the order in which gateways put them on the queue.

    `window` is the time in seconds within which a batch must end.
    """

    def __init__(self, trace: Trace, window: float) -> None:
        self._numbers: list[int] = [] if trace.batches is None else trace.batches.tolist()
        self._window = window
        count = max(self._numbers, default=-1) + 1
        self._created = [inf] * count
        self._stored: list[deque[int]] = [deque() for _ in range(count)]
        self._queued = [0] * count
        self._total = [self._numbers.count(number) for number in range(count)]
        self._done = [0] * count
        self._ended = [0.0] * count

    def has(self, request: int) -> bool:
        return bool(self._numbers) and self._numbers[request] >= 0

    def arrive(self, request: int, now: float) -> None:
        """Stores a request of a batch that is created now."""
        number = self._numbers[request]
        self._created[number] = now
        self._stored[number].append(request)

    def next(self) -> int | None:
        """A request to be put on the queue next; None if there is none now."""
        for number, stored in enumerate(self._stored):
            if stored and self._queued[number] < CONCURRENCY:
                return stored[0]
        return None

    def queue(self, request: int) -> None:
        """Notes that the request that is next was put on the queue."""
        number = self._numbers[request]
        self._stored[number].popleft()
        self._queued[number] += 1

    def end(self, request: int, now: float) -> None:
        """Notes that a queued request has ended, with a result or too late."""
        number = self._numbers[request]
        self._queued[number] -= 1
        self._done[number] += 1
        self._ended[number] = now

    def drop_late(self, now: float) -> int:
        """Drops the stored requests of batches whose window has ended; returns how many."""
        dropped = 0
        for number, stored in enumerate(self._stored):
            if stored and now > self._created[number] + self._window:
                dropped += len(stored)
                self._done[number] += len(stored)
                stored.clear()
        return dropped

    def behind(self, now: float) -> int:
        """The number of batches that are behind their pace."""
        return sum(
            is_behind(
                created=created, expires=created + self._window, now=now, total=total, done=done
            )
            for created, total, done in zip(self._created, self._total, self._done, strict=True)
            if now >= created
        )

    def longest(self) -> float | None:
        """The seconds that the slowest batch took; None without batches."""
        return max(map(sub, self._ended, self._created), default=None)

    @property
    def last_end(self) -> float:
        return max(self._ended, default=0.0)
