"""Whether the other ranks still run, known from the threads that watch them."""

import logging
from collections.abc import Callable
from threading import Event, Lock

from ..errors import RankFailed

logger = logging.getLogger(__name__)

OnFailure = Callable[[Exception], None]


class Fate:
    """Thread-safe. The first end that nobody asked for is the failure of all."""

    def __init__(self, abort: Callable[[], None]) -> None:
        """`abort` frees who waits for the ranks."""
        self._abort = abort
        self._lock = Lock()
        self._failed = Event()
        self._failure: RankFailed | None = None
        self._on_failure: OnFailure | None = None
        self._expected = False

    def ended(self, rank: int, how: str) -> None:
        with self._lock:
            if self._expected or self._failure is not None:
                return
            self._failure = RankFailed(f"rank {rank} of the engine {how}; its log says why")
            told = self._on_failure
        logger.error("a rank of the engine ended", extra={"rank": rank, "how": how})
        self._abort()
        self._failed.set()
        if told is not None:
            told(self._failure)

    def expect(self) -> None:
        """From now on ranks may end."""
        with self._lock:
            self._expected = True

    def watch(self, on_failure: OnFailure) -> None:
        """Calls it when a rank fails, at once where one has; from any thread."""
        with self._lock:
            self._on_failure = on_failure
            failure = self._failure
        if failure is not None:
            on_failure(failure)

    def wait(self, timeout: float) -> RankFailed | None:
        """The failure, if there is one within `timeout` seconds."""
        self._failed.wait(timeout)
        return self._failure

    def check(self) -> None:
        """Raises RankFailed where a rank has failed or all are stopped."""
        if self._failure is not None:
            raise RankFailed(str(self._failure))
        if self._expected:
            raise RankFailed("the ranks of this engine are stopped: make a new one")
