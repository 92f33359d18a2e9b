"""The drain of a gateway after SIGTERM: it accepts no new requests, and running answers get time to
end."""

import asyncio


class Drain:
    """`expired` is done when running answers must end at once. Create it on the event loop."""

    def __init__(self) -> None:
        self.expired: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.draining = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, budget: float) -> None:
        """Gives running answers `budget` seconds from now. Later calls change nothing."""
        if not self.draining:
            self.draining = True
            self._timer = asyncio.get_running_loop().call_later(budget, self._expire)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        if not self.expired.done():
            self.expired.set_result(None)
