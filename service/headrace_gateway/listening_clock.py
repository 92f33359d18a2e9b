"""A monotonic clock that stands still while this process does.

What an engine could not have told a gateway that was stopped, or busy for seconds, must not count
as the engine's silence. Knows nothing of engines, and is no clock for deadlines.
"""

import time
from collections.abc import Callable


class ListeningClock:
    """Seconds in which the event loop was there to listen, with an arbitrary beginning.

    Its user calls `tick` each `interval` seconds from the event loop. Of the time between two ticks
    no more than an interval counts: the rest is how late the second one came. Never goes back.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.interval = interval
        self._clock = clock
        self._due = clock() + interval
        self._lost = 0.0

    def __call__(self) -> float:
        return min(self._clock(), self._due) - self._lost

    def tick(self) -> float:
        """The loop is here. Returns by how many seconds it is late."""
        now = self._clock()
        late = max(0.0, now - self._due)
        self._lost += late
        self._due = now + self.interval
        return late
