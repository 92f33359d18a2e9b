"""Reads other gateways' reply streams, for requests that those have and clients here want as well.

Only reads: who follows another gateway's stream comes to the same history as that gateway, from the
same replies in the same order, and leaves it to that gateway to answer the engines.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing

from headrace_common.messages import Frame
from headrace_common.protocol.base import GatewayQueue


class Following:
    """One reader for each gateway that is followed. `deliver` gets (frame, gateway id)."""

    def __init__(
        self,
        queue: GatewayQueue,
        deliver: Callable[[Frame, str], None],
        failed: Callable[["asyncio.Task[None]"], None],
    ) -> None:
        self._queue = queue
        self._deliver = deliver
        self._failed = failed
        self._readers: dict[str, asyncio.Task[None]] = {}

    @property
    def gateways(self) -> Collection[str]:
        return tuple(self._readers)

    async def add(self, gateway_id: str) -> None:
        """From here on every frame to that gateway is delivered. Raises BackendUnavailable."""
        if gateway_id in self._readers:
            return
        frames = await self._queue.frames_to(gateway_id)
        if gateway_id not in self._readers:
            reader = asyncio.create_task(self._read(gateway_id, frames), name="follow")
            reader.add_done_callback(self._failed)
            self._readers[gateway_id] = reader

    def keep(self, gateways: Collection[str]) -> None:
        """Stops following all others."""
        for gateway_id in self._readers.keys() - set(gateways):
            self._readers.pop(gateway_id).cancel()

    async def close(self) -> None:
        readers = list(self._readers.values())
        self.keep(())
        await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, gateway_id: str, frames: AsyncIterator[Frame]) -> None:
        async with aclosing(frames) as open_frames:  # type: ignore[type-var]
            async for frame in open_frames:
                self._deliver(frame, gateway_id)
