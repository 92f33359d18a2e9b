"""Requests for embeddings that outlive their connection: a client resumes one by its key.

Each input is one request in the queue, and Redis stores the vector of each. Any gateway reads the
vectors that exist instead of computing them again.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace_common.errors import BackendUnavailable, RequestFailed
from headrace_common.protocol.accounts import Item, ItemKind
from headrace_common.protocol.base import RequestStatus
from headrace_common.protocol.failures import CALLED_OFF
from headrace_common.protocol.store import RequestStore, StoredRequest
from headrace_common.wire.messages import Failed, GenerateRequest

from ..errors import to_api_error
from ..limits.tenant_stores import RECORD_BYTES, TenantStores
from ..queue_client.ports import Client, RequestDirectory
from .embedding_sessions import EmbeddingSession
from .presence import NO_OUTCOME
from .stored_requests import RequestSnapshot, check_same, lost

# The assumed number of dimensions if a model's files do not say its hidden size.
DEFAULT_VECTOR_LENGTH = 4096
READ_AT_ONCE = 64

OPERATION = "embeddings"


@dataclass(frozen=True, slots=True)
class StoredEmbeddingRequest:
    """A stored request for embeddings, and the vectors that exist, by the ids of the inputs.

    `fresh`: this caller stored the request. `running`: this gateway runs it already.
    """

    stored: StoredRequest
    vectors: Mapping[str, bytes]
    fresh: bool = False
    running: bool = False

    @property
    def to_run(self) -> list[GenerateRequest]:
        """The requests that this caller has to queue."""
        if self.running:
            return []
        return [each for each in self.stored.requests if each.request_id not in self.vectors]

    @property
    def new(self) -> bool:
        """Whether this caller stored the request, and no vector existed before."""
        return self.fresh and not self.vectors


class StoredEmbeddings:
    """Stores requests for embeddings. Raises ApiError, and BackendUnavailable if Redis is
    unreachable."""

    def __init__(
        self,
        store: RequestStore,
        request_directory: RequestDirectory,
        client: Client,
        stores: TenantStores,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._request_directory = request_directory
        self._client = client
        self._stores = stores
        self._clock = clock
        self._sessions: dict[str, EmbeddingSession] = {}

    async def keep(self, fresh: StoredRequest, item: Item) -> StoredEmbeddingRequest:
        """Stores a request, or finds the one that is stored under its id, and returns it.

        `item` is counted in the tenant's store. Raises the failure of the stored request if a
        second attempt would fail in the same way.
        """
        known = await self._store.get(fresh.request_id)
        if known is None:
            known = await self._put(fresh, item)
        if known.name == fresh.name:
            return StoredEmbeddingRequest(fresh, {}, fresh=True)
        check_same(known, fresh)
        if known.name in self._sessions:
            return StoredEmbeddingRequest(known, {}, running=True)
        statuses = await self._statuses(known)
        failed = _failure(statuses)
        if failed is not None and failed.failure not in NO_OUTCOME:
            raise RequestFailed(failed.failure, failed.message)
        vectors = _vectors(known, statuses)
        if not self._must_restart(known, statuses):
            return StoredEmbeddingRequest(known, vectors)
        return await self._replace(known, fresh, vectors, item)

    def _must_restart(
        self, stored: StoredRequest, statuses: Sequence[RequestStatus | None]
    ) -> bool:
        """Whether an input has ended without its vector, or can no longer have one."""
        expired = stored.requests[0].deadline_ms <= self._clock() * 1000
        return any(
            expired
            if request_status is None
            else request_status.outcome is not None and not _vector(request_status)
            for request_status in statuses
        )

    async def _replace(
        self,
        known: StoredRequest,
        fresh: StoredRequest,
        vectors: Mapping[str, bytes],
        item: Item,
    ) -> StoredEmbeddingRequest:
        """Stores `fresh` with those requests of `known` that have their vectors."""
        pairs = zip(known.requests, fresh.requests, strict=True)
        requests = tuple(old if old.request_id in vectors else new for old, new in pairs)
        merged = replace(fresh, requests=requests, generation=secrets.token_hex(8))
        stored = await self._put(merged, item, replaces=known)
        if stored.name != merged.name:
            vectors = _vectors(stored, await self._statuses(stored))
            return StoredEmbeddingRequest(stored, vectors)
        return StoredEmbeddingRequest(merged, vectors, fresh=True)

    async def _put(
        self, fresh: StoredRequest, item: Item, replaces: StoredRequest | None = None
    ) -> StoredRequest:
        """Counts the request before it stores it, so that concurrent requests cannot fill Redis."""
        await self._stores.occupy(fresh.requests[0].tenant, item, "Idempotency-Key")
        return await self._store.put(fresh, replaces)

    async def forget(self, inputs: StoredEmbeddingRequest) -> None:
        """Removes a new request that will not run. If Redis is unreachable the request stays, and
        its key still finds it."""
        if not inputs.new:
            return
        try:
            await self._store.remove(inputs.stored)
            await self.vacate(inputs.stored.request_id, inputs.stored.requests[0].tenant)
        except BackendUnavailable:
            return

    async def vacate(self, request_id: str, tenant: str) -> None:
        """Stops counting the request's vectors in the tenant's store."""
        await self._stores.vacate(tenant, (ItemKind.EMBEDDINGS, ItemKind.LINE), request_id)

    def open(self, inputs: StoredEmbeddingRequest, queued: Callable[[], None]) -> EmbeddingSession:
        """Returns the session that runs the inputs; it calls `queued` for each input that it
        queues."""
        session = self._sessions.get(inputs.stored.name)
        if session is None:
            session = EmbeddingSession(
                inputs.stored,
                inputs.vectors,
                self._client,
                self._store,
                clock=self._clock,
                queued=queued,
                refused=lambda: self.forget(inputs),
                on_end=self._ended,
            )
            self._sessions[inputs.stored.name] = session
        return session

    def _ended(self, session: EmbeddingSession) -> None:
        self._sessions.pop(session.stored.name, None)

    def close(self) -> None:
        """Stops the sessions of this gateway, so that other gateways continue their requests."""
        for session in list(self._sessions.values()):
            session.close()

    async def cancel(self, stored: StoredRequest) -> None:
        """Ends the request if it runs here."""
        session = self._sessions.get(stored.name)
        if session is not None:
            await session.cancel()

    async def snapshot(self, stored: StoredRequest) -> tuple[RequestSnapshot, Sequence[bytes]]:
        """Returns the request's state, and its vectors once all exist."""
        statuses = await self._statuses(stored)
        failed = _failure(statuses)
        if failed is not None:
            cancelled = failed.failure in CALLED_OFF
            error = to_api_error(RequestFailed(failed.failure, failed.message))
            status = "cancelled" if cancelled else "failed"
            return RequestSnapshot(stored=stored, status=status, error=error), ()
        vectors = _vectors(stored, statuses)
        if len(vectors) == len(stored.requests):
            found = [vectors[request.request_id] for request in stored.requests]
            return RequestSnapshot(stored=stored, status="completed"), found
        if self._must_restart(stored, statuses):
            return RequestSnapshot(stored=stored, status="failed", error=lost()), ()
        started = vectors or any(
            request_status and request_status.started for request_status in statuses
        )
        return RequestSnapshot(stored=stored, status="in_progress" if started else "queued"), ()

    async def _statuses(self, stored: StoredRequest) -> list[RequestStatus | None]:
        found: list[RequestStatus | None] = []
        for at in range(0, len(stored.requests), READ_AT_ONCE):
            some = stored.requests[at : at + READ_AT_ONCE]
            found += await asyncio.gather(
                *(
                    self._request_directory.request_status(each.request_id, each.model)
                    for each in some
                )
            )
        return found


def bytes_of(
    requests: Sequence[GenerateRequest], size: int | None, token_size: int | None = None
) -> int:
    """Returns an upper bound of the bytes that the answers take in Redis.

    `size` is the number of dimensions of the model's vectors. A model with a `token_size` makes a
    vector of as many dimensions for each token.
    """
    numbers = requests[0].pooling.dimensions if requests[0].pooling is not None else None
    vector = 0 if token_size else 4 * (numbers or size or DEFAULT_VECTOR_LENGTH)
    token = 4 + 4 * (token_size or 0)
    return sum(
        vector + token * len(request.prompt_token_ids) + RECORD_BYTES for request in requests
    )


def _vector(request_status: RequestStatus | None) -> bytes | None:
    if (
        request_status is None
        or request_status.outcome is None
        or not request_status.outcome.choices
    ):
        return None
    return request_status.outcome.choices[0].embedding


def _vectors(stored: StoredRequest, statuses: Sequence[RequestStatus | None]) -> dict[str, bytes]:
    pairs = zip(stored.requests, map(_vector, statuses), strict=True)
    return {request.request_id: vector for request, vector in pairs if vector is not None}


def _failure(statuses: Sequence[RequestStatus | None]) -> Failed | None:
    """Returns a failure that a second attempt would repeat, or else the first failure."""
    failures = [
        request_status.outcome.failed
        for request_status in statuses
        if request_status is not None
        and request_status.outcome is not None
        and request_status.outcome.failed
    ]
    decisive = [failed for failed in failures if failed.failure not in NO_OUTCOME]
    return next(iter(decisive or failures), None)
