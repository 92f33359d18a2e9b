"""Replies and endings on their way to Redis, in order and never dropped while Redis is away.

One frame a gateway is written for everything that gathered since the last one, so a slow Redis
makes frames larger, not more. An ending is written only after the frames before it.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace_common.errors import BackendUnavailable
from headrace_common.messages import Reply
from headrace_common.protocol.base import EngineQueue, Outcome
from headrace_common.protocol.client import backoff

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0


async def persist(action: Callable[[], Awaitable[T]], what: str) -> T:
    """Repeats an idempotent action until Redis takes it, with growing pauses (seconds)."""
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


class Outbox:
    """The engine's writer. All methods but `run` are plain calls on the event loop's thread."""

    def __init__(self, queue: EngineQueue) -> None:
        self._queue = queue
        self._replies: dict[str, list[Reply]] = defaultdict(list)
        self._endings: list[tuple[str, int, Outcome]] = []
        self._heard: dict[str, float] = {}
        self._filled = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()

    def put(self, gateway_id: str, reply: Reply) -> None:
        self._replies[gateway_id].append(reply)
        self._wake()

    def end(self, request_id: str, attempt: int, outcome: Outcome) -> None:
        """Stores the outcome once everything put before is written."""
        self._endings.append((request_id, attempt, outcome))
        self._wake()

    def greet(self, gateway_id: str, quiet_for: float) -> None:
        """Sends a sign of life to a gateway that got nothing for `quiet_for` seconds."""
        now = time.monotonic()
        self._heard = {g: at for g, at in self._heard.items() if now - at < quiet_for}
        if gateway_id not in self._heard and gateway_id not in self._replies:
            self._replies[gateway_id] = []
            self._wake()

    def _wake(self) -> None:
        self._settled.clear()
        self._filled.set()

    async def settled(self) -> None:
        """Returns when everything put so far is in Redis."""
        await self._settled.wait()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            replies, self._replies = self._replies, defaultdict(list)
            endings, self._endings = self._endings, []
            if replies:
                self._heard |= dict.fromkeys(replies, time.monotonic())
                await persist(lambda r=replies: self._queue.publish(r), "publish")  # type: ignore[misc]
            if endings:
                await asyncio.gather(*(self._finish(*ending) for ending in endings))
            if not self._filled.is_set():
                self._settled.set()

    async def _finish(self, request_id: str, attempt: int, outcome: Outcome) -> None:
        await persist(lambda: self._queue.finish(request_id, attempt, outcome), "finish")
