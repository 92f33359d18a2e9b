"""Writes replies and outcomes to Redis, in order; it drops none while Redis is unreachable.

All replies to one gateway since the last write become one frame, so a slow Redis makes frames
larger, not more frequent. An outcome is written after the frames before it.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import EngineQueue, Outcome
from headrace_common.protocol.ledger import AttemptUsage
from headrace_common.protocol.redis.client.client import backoff
from headrace_common.wire.messages import Reply

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0


async def retry(action: Callable[[], Awaitable[T]], what: str) -> T:
    """Repeats an idempotent action until Redis accepts it, with growing pauses."""
    attempt = 0
    while True:
        try:
            return await action()
        except BackendUnavailable as error:
            logger.warning(
                "redis unavailable, will retry", extra={"what": what, "error": str(error)}
            )
        await backoff(attempt, FIRST_PAUSE, LONGEST_PAUSE)
        attempt += 1


class ReplyWriter:
    """The replies and outcomes of one engine. Its methods are called on the event loop's thread."""

    def __init__(self, queue: EngineQueue) -> None:
        self._queue = queue
        self._replies: dict[str, list[Reply]] = defaultdict(list)
        self._outcomes: list[tuple[str, int, Outcome, AttemptUsage]] = []
        self._last_frame_at: dict[str, float] = {}
        self._pending = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()

    def put(self, gateway_id: str, reply: Reply) -> None:
        self._replies[gateway_id].append(reply)
        self._wake()

    def end(self, request_id: str, attempt: int, outcome: Outcome, usage: AttemptUsage) -> None:
        """Stores the outcome after everything that was put before."""
        self._outcomes.append((request_id, attempt, outcome, usage))
        self._wake()

    def keep_alive(self, gateway_id: str, interval: float) -> None:
        """Sends an empty frame to a gateway that got none for `interval` seconds."""
        now = time.monotonic()
        recent = {g: at for g, at in self._last_frame_at.items() if now - at < interval}
        self._last_frame_at = recent
        if gateway_id not in recent and gateway_id not in self._replies:
            self._replies[gateway_id] = []
            self._wake()

    def _wake(self) -> None:
        self._flushed.clear()
        self._pending.set()

    async def flush(self) -> None:
        """Waits until everything that was put is in Redis."""
        await self._flushed.wait()

    async def run(self) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            replies, self._replies = self._replies, defaultdict(list)
            outcomes, self._outcomes = self._outcomes, []
            if replies:
                self._last_frame_at |= dict.fromkeys(replies, time.monotonic())
                await retry(partial(self._queue.publish, replies), "publish")
            if outcomes:
                finishes = [partial(self._queue.finish, *outcome) for outcome in outcomes]
                await asyncio.gather(*(retry(finish, "finish") for finish in finishes))
            if not self._pending.is_set():
                self._flushed.set()
