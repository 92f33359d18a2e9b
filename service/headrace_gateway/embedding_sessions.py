"""Kept requests for embeddings: each runs here once, for any number of readers.

Nothing more of one is queued while it has no reader here; one that nobody wants is cancelled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from headrace_common.errors import FailureCode, HeadraceError, RequestFailed
from headrace_common.messages import GenerateRequest
from headrace_common.protocol.store import RequestStore, StoredRequest

from .ports import Client, Generation
from .vectors import Vectors
from .wanted import NO_OUTCOME, Readers

logger = logging.getLogger(__name__)


class EmbeddingSession:
    """A stored request for embeddings that runs here. `on_end` is called once, when it has ended.

    `known` are the vectors that are there already, by their requests' ids. `queued` is called for
    each request that is put in the queue, `refused` where the queue took none of them. `clock` is
    Redis'.
    """

    def __init__(
        self,
        stored: StoredRequest,
        known: Mapping[str, bytes],
        client: Client,
        store: RequestStore,
        *,
        clock: Callable[[], float],
        queued: Callable[[], None],
        refused: Callable[[], Awaitable[None]],
        on_end: Callable[["EmbeddingSession"], None],
    ) -> None:
        self.stored = stored
        self.cached_tokens = 0
        self.readers = Readers(stored, store)
        self._client = client
        self._queued = queued
        self._refused = refused
        self._on_end = on_end
        self._cancelling = False
        self._vectors = Vectors(stored.requests, self._submit, self._made, known, clock)
        self._work = asyncio.create_task(self._run(), name="embeddings")
        self._guard = asyncio.create_task(self._watch(), name="guard")
        self._work.add_done_callback(self._end)

    async def result(self) -> Sequence[bytes]:
        """The vectors in order. Raises what ended it without them."""
        return await asyncio.shield(self._work)

    async def cancel(self) -> None:
        """Ends it for everybody."""
        self._cancelling = True
        await self._vectors.cancel()
        self._work.cancel()

    def close(self) -> None:
        """Leaves it to other gateways."""
        self._guard.cancel()
        self._work.cancel()
        self._vectors.leave()

    async def _run(self) -> Sequence[bytes]:
        try:
            return await self._vectors.all()
        except asyncio.CancelledError:
            if self._cancelling:  # while none of it was in the queue
                raise RequestFailed(FailureCode.CANCELLED, "the request was cancelled") from None
            raise
        except HeadraceError as error:
            if not self._vectors.begun:
                await self._refused()
            elif _decides(error):
                await self._vectors.cancel()
            else:
                self._vectors.leave()  # what is done by then need not be done again
            raise

    async def _submit(self, request: GenerateRequest) -> Generation:
        await self.readers.present()
        generation = await self._client.submit(request)
        self._queued()
        return generation

    def _made(self, _: GenerateRequest, cached_tokens: int) -> None:
        self.cached_tokens += cached_tokens

    async def _watch(self) -> None:
        await self.readers.lost()
        extra = {"request_id": self.stored.request_id}
        logger.info("request cancelled: no client came back", extra=extra)
        await self.cancel()

    def _end(self, work: "asyncio.Task[Sequence[bytes]]") -> None:
        self._guard.cancel()
        self._on_end(self)
        error = None if work.cancelled() else work.exception()
        if error is not None and not isinstance(error, HeadraceError):
            extra = {"request_id": self.stored.request_id}
            logger.critical("embeddings failed", extra=extra, exc_info=error)


def _decides(error: HeadraceError) -> bool:
    """Whether the same request would end so again."""
    return isinstance(error, RequestFailed) and error.failure not in NO_OUTCOME
