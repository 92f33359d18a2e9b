"""Keeps an engine from taking work while memory is short.

The KV cache has a fixed size; prompts, outputs and working memory do not. So the memory left on the
machine and within the container's limit is checked before work is taken.
"""

import logging
import time
from collections.abc import Callable

from ..kv_cache.memory_budget import GIB

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
# Memory is short from when less than this is free until twice as much is free.
MIN_FREE_BYTES = GIB // 8


class MemoryGuard:
    """Watches free memory. `available` returns free bytes; it is called twice a second at most."""

    def __init__(
        self,
        available: Callable[[], int],
        *,
        min_free: int = MIN_FREE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._available, self._min_free, self._clock = available, min_free, clock
        self._checked_at = float("-inf")
        self._short = False

    @property
    def short(self) -> bool:
        """Whether memory is short, so that no more work should be taken."""
        now = self._clock()
        if now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            self._check()
        return self._short

    def _check(self) -> None:
        free = self._available()
        wanted = 2 * self._min_free if self._short else self._min_free
        short = free < wanted
        if short == self._short:
            return
        self._short = short
        if short:
            logger.warning("memory is short, no more work is taken", extra={"free_bytes": free})
        else:
            logger.info("memory is free again", extra={"free_bytes": free})
