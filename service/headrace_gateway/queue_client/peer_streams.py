"""Reads other gateways' reply streams, for their requests that also have clients here.

Only reads: the same replies in the same order give the same history here; the other gateway answers
the engines.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing

from headrace_common.protocol.base import GatewayQueue
from headrace_common.wire.messages import Frame


class PeerStreams:
    """Has a reader for each gateway and model that is followed. `deliver` gets (frame,
    gateway id)."""

    def __init__(
        self,
        queue: GatewayQueue,
        deliver: Callable[[Frame, str], None],
        failed: Callable[["asyncio.Task[None]"], None],
    ) -> None:
        self._queue = queue
        self._deliver = deliver
        self._failed = failed
        self._readers: dict[tuple[str, str], asyncio.Task[None]] = {}

    @property
    def gateways(self) -> Collection[str]:
        return {gateway_id for gateway_id, _ in self._readers}

    async def add(self, gateway_id: str, model: str) -> None:
        """Delivers every frame of the model's engines to that gateway from now on.

        Raises BackendUnavailable.
        """
        if (gateway_id, model) in self._readers:
            return
        frames = await self._queue.frames_to(gateway_id, model)
        if (gateway_id, model) not in self._readers:
            reader = asyncio.create_task(self._read(gateway_id, frames), name="follow")
            reader.add_done_callback(self._failed)
            self._readers[gateway_id, model] = reader

    def keep(self, followed: Collection[tuple[str, str]]) -> None:
        """Stops following all gateways but `followed`, each of which is given with a model."""
        for each in self._readers.keys() - set(followed):
            self._readers.pop(each).cancel()

    async def close(self) -> None:
        readers = list(self._readers.values())
        self.keep(())
        await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, gateway_id: str, frames: AsyncIterator[Frame]) -> None:
        async with aclosing(frames) as open_frames:  # type: ignore[type-var]
            async for frame in open_frames:
                self._deliver(frame, gateway_id)
