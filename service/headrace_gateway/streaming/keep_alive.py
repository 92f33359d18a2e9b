"""Comments that keep silent streams open: one task writes those of all streams of a gateway.

A task and a look at the queue for each stream would cost more than the comments.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import QueuePosition

from ..queue_client.ports import QueuePositions
from .sse import EventStream

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n"
# The status is sent with the first event if that comes within this time. This saves a packet, and a
# failure can still have a status of its own. The delay also ensures that a proxy has sent the
# whole request before it gets an answer: otherwise Go's reverse proxy breaks the stream.
OPEN_AFTER_S = 1.0
TICKS = 16  # in the interval of comments, which are at most one tick late
AT_ONCE = 128  # comments between which other work runs


@dataclass(slots=True, eq=False)
class _Silent:
    """A stream of a request in the queue. `end` follows each comment; `sending` writes it if the
    client does not keep up."""

    stream: EventStream
    request_id: str
    model: str
    end: bytes
    sending: asyncio.Task[None] | None = None


class KeepAlives:
    """Writes a comment into each stream that was silent for `interval` seconds.

    While the stream's request waits, the comment has its position, which `positions` gives.
    """

    def __init__(self, interval: float, positions: QueuePositions) -> None:
        self._interval = interval
        self._positions = positions
        self._streams: dict[_Silent, None] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def of(
        self, stream: EventStream, request_id: str, model: str, *, end: bytes, open_soon: bool
    ) -> Iterator[None]:
        """Keeps a stream open during the block.

        With `open_soon` its status is sent after OPEN_AFTER_S if no event came before.
        """
        silent = _Silent(stream, request_id, model, end)
        self._streams[silent] = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="keep-alive")
        timer: asyncio.TimerHandle | None = None
        if open_soon:
            after = min(OPEN_AFTER_S, self._interval)
            timer = asyncio.get_running_loop().call_later(after, self._send, silent, b"")
        try:
            yield
        finally:
            del self._streams[silent]
            if timer is not None:
                timer.cancel()
            if silent.sending is not None:
                silent.sending.cancel()

    async def _run(self) -> None:
        """Runs until no stream is left."""
        while self._streams:
            await asyncio.sleep(self._interval / TICKS)
            due = [silent for silent in self._streams if self._is_due(silent)]
            by_model: dict[str, list[_Silent]] = {}
            for silent in due:
                by_model.setdefault(silent.model, []).append(silent)
            for model, silents in by_model.items():
                for first in range(0, len(silents), AT_ONCE):
                    await self._comment(silents[first : first + AT_ONCE], model)

    def _is_due(self, silent: _Silent) -> bool:
        return silent.stream.silent >= self._interval

    async def _comment(self, silents: Sequence[_Silent], model: str) -> None:
        places = await self._places([silent.request_id for silent in silents], model)
        for silent, place in zip(silents, places, strict=True):
            if silent in self._streams and self._is_due(silent):
                text = KEEP_ALIVE if place is None else queued_comment(place)
                self._send(silent, text + silent.end)

    async def _places(
        self, request_ids: Sequence[str], model: str
    ) -> Sequence[QueuePosition | None]:
        try:
            return await self._positions.queue_positions(request_ids, model)
        except BackendUnavailable:
            pass
        except Exception as error:
            # Engines of a model can write its requests' state, and must not be able to end the
            # comments of other models.
            fields = {"model": model}
            logger.error("the state of a queue is corrupt", extra=fields, exc_info=error)
        return [None] * len(request_ids)

    def _send(self, silent: _Silent, content: bytes) -> None:
        """Writes a comment; without content only the status, if that is not sent yet."""
        stream = silent.stream
        if stream.ready:
            if content:
                stream.write(content)
        elif not stream.busy:
            silent.sending = asyncio.create_task(stream.send(content))


def queued_comment(place: QueuePosition) -> bytes:
    """Returns a comment for people, and for clients that read it: `: queued position=3 eta=12s`."""
    eta = "" if place.eta is None else f" eta={max(1, math.ceil(place.eta))}s"
    return f": queued position={place.position}{eta}\n".encode()
