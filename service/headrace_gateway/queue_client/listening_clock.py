"""A monotonic clock that stops while this process does not run.

While the gateway is stopped, or busy for seconds, it hears no engine. This time must not count as
an engine's silence. It is not meant for deadlines.
"""

import time
from collections.abc import Callable


class ListeningClock:
    """Counts the seconds in which the event loop ran, from an arbitrary start.

    Call `tick` every `interval` seconds from the event loop. At most one interval counts between
    two ticks: the rest is the delay of the second one. Never goes back.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.interval = interval
        self._clock = clock
        self._due = clock() + interval
        self._lost = 0.0

    def __call__(self) -> float:
        return min(self._clock(), self._due) - self._lost

    def tick(self) -> float:
        """Notes that the loop runs. Returns by how many seconds the call is late."""
        now = self._clock()
        late = max(0.0, now - self._due)
        self._lost += late
        self._due = now + self.interval
        return late
