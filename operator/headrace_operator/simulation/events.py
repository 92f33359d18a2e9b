"""Virtual time: a queue of events that run in the order of their times. Nothing sleeps."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

NEVER = float("inf")


class EventQueue:
    """Functions that each run at a time in seconds. `now` is the time of the latest one.

    Functions of equal times run by `rank`, lowest first, then in the order in which they came.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = count()
        self._cancelled: set[int] = set()

    @property
    def next_time(self) -> float:
        """The time of the first event, which may be a cancelled one; NEVER if there is none."""
        return self._events[0][0] if self._events else NEVER

    def at(
        self, time: float, function: Callable[..., object], *arguments: Any, rank: int = 0
    ) -> int:
        """Adds an event and returns its number, by which it can be cancelled."""
        number = next(self._numbers)
        heappush(self._events, (time, rank, number, function, arguments))
        return number

    def cancel(self, number: int) -> None:
        """Cancels an event that has not run."""
        self._cancelled.add(number)

    def run_next(self) -> None:
        """Runs the first event. There must be one."""
        time, _, number, function, arguments = heappop(self._events)
        if number in self._cancelled:
            self._cancelled.remove(number)
            return
        self.now = time
        function(*arguments)

    def run_until(self, time: float) -> None:
        """Runs the events up to this time, which is the present one afterwards."""
        while self._events and self._events[0][0] <= time:
            self.run_next()
        self.now = time
