"""Redis' clock as estimated by this process, independent of the machine's own clock.

Deadlines and expiries are on this clock, since scripts compare them with Redis' TIME. It is
measured at the start and then with every beat. In between the monotonic clock advances it, so that
a step of the machine's clock changes nothing.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

WARN_OFFSET_S = 5.0
"""The offset between both clocks above which a warning is given."""
_DRIFT = 1e-4  # a generous bound on the drift between two machines' clocks, seconds per second


@dataclass(frozen=True, slots=True)
class _Sample:
    """One measurement. `base` is Redis' time minus the monotonic clock, within `error` seconds."""

    base: float
    error: float
    at: float

    def error_at(self, now: float) -> float:
        return self.error + (now - self.at) * _DRIFT


class RedisClock:
    """Redis' time in Unix seconds; this machine's time until it is measured.

    `wall` is this machine's Unix time. Reading is safe on any thread, measuring on one event loop.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._best: _Sample | None = None
        self._noted = False

    @property
    def measured(self) -> bool:
        return self._best is not None

    def now(self) -> float:
        best = self._best
        return self._wall() if best is None else self._monotonic() + best.base

    def now_ms(self) -> int:
        return int(self.now() * 1000)

    @property
    def offset(self) -> float:
        """Seconds by which Redis' clock is ahead of this machine's."""
        return self.now() - self._wall()

    def notice(self) -> str | None:
        """A warning for the user; None while both clocks agree."""
        offset = self.offset
        if abs(offset) <= WARN_OFFSET_S:
            return None
        relation = "behind" if offset > 0 else "ahead of"
        return (
            f"this machine's clock is {abs(offset):.1f} s {relation} Redis'; requests follow "
            "Redis' clock: check the time synchronisation of both machines"
        )

    async def measure(self, ask: Callable[[], Awaitable[tuple[int, int]]]) -> None:
        """Measures the clock. `ask` sends TIME and returns its reply: seconds and microseconds."""
        sent = self._monotonic()
        seconds, microseconds = await ask()
        received = self._monotonic()
        middle, error = (sent + received) / 2, (received - sent) / 2
        self._take(_Sample(seconds + microseconds / 1e6 - middle, error, received))
        self._tell()

    def _take(self, new: _Sample) -> None:
        """Keeps the most exact sample; a sample that contradicts it is from another clock."""
        best = self._best
        if best is not None:
            error = best.error_at(new.at)
            if new.error > error and abs(new.base - best.base) <= new.error + error:
                return
        self._best = new

    def _tell(self) -> None:
        """Logs once that the clocks differ, and once that they agree again."""
        notice = self.notice()
        if notice is not None and not self._noted:
            extra = {"offset_s": round(self.offset, 3), "notice": notice}
            logger.warning("clocks differ from redis", extra=extra)
        elif notice is None and self._noted:
            logger.info("clocks agree with redis again", extra={"offset_s": round(self.offset, 3)})
        self._noted = notice is not None
