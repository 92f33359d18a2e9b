"""Stored requests for embeddings that run here: each runs once, for any number of clients.

While a request has no client here, no more of it is queued; without a client anywhere it is
cancelled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from headrace_common.errors import FailureCode, HeadraceError, RequestFailed
from headrace_common.protocol.store import RequestStore, StoredRequest
from headrace_common.wire.messages import GenerateRequest

from ..queue_client.ports import Client, Generation
from .embedding_batch import EmbeddingBatch
from .presence import NO_OUTCOME, ClientPresence

logger = logging.getLogger(__name__)


class EmbeddingSession:
    """A stored request for embeddings that runs here. `on_end` is called once, at its end.

    `known` are vectors that exist, by their requests' ids. `queued` is called for each request that
    is queued, `refused` if the queue took none. `clock` is Redis' clock.
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
        self.presence = ClientPresence(stored, store)
        self._client = client
        self._queued = queued
        self._refused = refused
        self._on_end = on_end
        self._cancelling = False
        self._first = asyncio.Event()
        self._batch = EmbeddingBatch(stored.requests, self._submit, self._made, known, clock)
        self._work = asyncio.create_task(self._run(), name="embeddings")
        self._guard = asyncio.create_task(self._watch(), name="guard")
        self._work.add_done_callback(self._end)

    async def begun(self) -> None:
        """Returns once an input is queued or known.

        Raises the error that ended the request before that.
        """
        if self._batch.begun:
            return
        queued = asyncio.create_task(self._first.wait())
        try:
            await asyncio.wait((queued, self._work), return_when="FIRST_COMPLETED")
        finally:
            queued.cancel()
        if not self._first.is_set():
            await self.result()

    async def result(self) -> Sequence[bytes]:
        """Returns the vectors in order. Raises the error if the request ended without them."""
        return await asyncio.shield(self._work)

    async def cancel(self) -> None:
        """Ends the request for all clients."""
        self._cancelling = True
        await self._batch.cancel()
        self._work.cancel()

    def close(self) -> None:
        """Leaves the request to other gateways."""
        self._guard.cancel()
        self._work.cancel()
        self._batch.leave()

    async def _run(self) -> Sequence[bytes]:
        try:
            return await self._batch.all()
        except asyncio.CancelledError:
            if self._cancelling:  # before any input was in the queue
                raise RequestFailed(FailureCode.CANCELLED, "the request was cancelled") from None
            raise
        except HeadraceError as error:
            if not self._batch.begun:
                await self._refused()
            elif _decides(error):
                await self._batch.cancel()
            else:
                self._batch.leave()  # vectors that exist are not computed again
            raise

    async def _submit(self, request: GenerateRequest) -> Generation:
        await self.presence.present()
        generation = await self._client.submit(request)
        self._queued()
        self._first.set()
        return generation

    def _made(self, _: GenerateRequest, cached_tokens: int) -> None:
        self.cached_tokens += cached_tokens

    async def _watch(self) -> None:
        await self.presence.lost()
        extra = {"request_id": self.stored.request_id}
        logger.info("request cancelled: no client came back", extra=extra)
        await self.cancel()

    def _end(self, work: "asyncio.Task[Sequence[bytes]]") -> None:
        self._guard.cancel()
        self._on_end(self)
        error = None if work.cancelled() else work.exception()
        if error is not None and not isinstance(error, HeadraceError):
            extra = {"request_id": self.stored.request_id}
            logger.critical("the session of stored embeddings failed", extra=extra, exc_info=error)


def _decides(error: HeadraceError) -> bool:
    """Whether a repeated request would end in the same way."""
    return isinstance(error, RequestFailed) and error.failure not in NO_OUTCOME
