"""Keeps an engine from taking more work than its memory bears, and says so.

The KV cache is bounded from the start; prompts, outputs and working memory are not. So what the
machine, the container's limit and the GPU have left is looked at before work is taken.
"""

import logging
import time
from collections.abc import Callable

from .kv_budget import GIB

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
# Bytes; less than that left counts as short, until twice as much is there again.
LEAST_FREE = GIB // 8


class MemoryGuard:
    """`available` gives the bytes that can still be taken; it is asked twice a second at most."""

    def __init__(
        self,
        available: Callable[[], int],
        *,
        least_free: int = LEAST_FREE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._available, self._least, self._clock = available, least_free, clock
        self._looked = float("-inf")
        self._short = False

    @property
    def short(self) -> bool:
        """Whether no more work should be taken."""
        now = self._clock()
        if now - self._looked >= LOOK_INTERVAL_S:
            self._looked = now
            self._look()
        return self._short

    def _look(self) -> None:
        free = self._available()
        wanted = 2 * self._least if self._short else self._least
        short = free < wanted
        if short == self._short:
            return
        self._short = short
        if short:
            logger.warning("memory is short, no more work is taken", extra={"free_bytes": free})
        else:
            logger.info("memory is free again", extra={"free_bytes": free})
