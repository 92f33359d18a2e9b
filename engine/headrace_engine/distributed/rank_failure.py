"""Records that a rank has failed, as reported by the threads that watch the ranks."""

import logging
from collections.abc import Callable
from threading import Event, Lock

from ..core.errors import RankFailed

logger = logging.getLogger(__name__)

OnFailure = Callable[[Exception], None]


class RankFailure:
    """Thread-safe record of the first unexpected end of a rank or node: from then on the engine
    fails."""

    def __init__(self, abort: Callable[[], None]) -> None:
        """`abort` releases threads that wait for the ranks."""
        self._abort = abort
        self._lock = Lock()
        self._failed = Event()
        self._failure: RankFailed | None = None
        self._on_failure: OnFailure | None = None
        self._expected = False

    def ended(self, rank: int, how: str) -> None:
        if (failure := self._record(f"rank {rank} of the engine {how}; its log says why")) is None:
            return
        logger.error("a rank of the engine ended", extra={"rank": rank, "how": how})
        self._announce(failure)

    def lost(self, node: int, how: str) -> None:
        if (failure := self._record(f"node {node} of the engine {how}")) is None:
            return
        logger.error("a node of the engine is lost", extra={"node": node, "how": how})
        self._announce(failure)

    def _record(self, problem: str) -> RankFailed | None:
        """The failure, if it is the first and unexpected."""
        with self._lock:
            if self._expected or self._failure is not None:
                return None
            self._failure = RankFailed(problem)
            return self._failure

    def _announce(self, failure: RankFailed) -> None:
        self._abort()
        self._failed.set()
        with self._lock:
            callback = self._on_failure
        if callback is not None:
            callback(failure)

    def expect_ends(self) -> None:
        """From now on, a rank that ends has not failed: the engine is stopping."""
        with self._lock:
            self._expected = True

    def watch(self, on_failure: OnFailure) -> None:
        """Calls `on_failure` when a rank fails, or now if one has failed; from any thread."""
        with self._lock:
            self._on_failure = on_failure
            failure = self._failure
        if failure is not None:
            on_failure(failure)

    def wait(self, timeout: float) -> RankFailed | None:
        """Returns the failure; waits up to `timeout` seconds for one."""
        self._failed.wait(timeout)
        return self._failure

    def check(self) -> None:
        """Raises RankFailed if a rank has failed or all are stopped."""
        if self._failure is not None:
            raise RankFailed(str(self._failure))
        if self._expected:
            raise RankFailed("the ranks of this engine are stopped: make a new one")
