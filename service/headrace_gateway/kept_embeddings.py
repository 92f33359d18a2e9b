"""Requests for embeddings that outlive their connection: found again under their key, and gone on
with where they stopped.

Each input is a request in the queue whose vector is kept there. What was done before is read, not
computed again, whichever gateway began it.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace_common.errors import BackendUnavailable, RequestFailed
from headrace_common.messages import Failed, GenerateRequest
from headrace_common.protocol.accounts import Item, Kind
from headrace_common.protocol.base import Standing
from headrace_common.protocol.failures import CALLED_OFF
from headrace_common.protocol.store import RequestStore, StoredRequest

from .embedding_sessions import EmbeddingSession
from .errors import to_api_error
from .kept import View, check_same, lost
from .ports import Client, Ledger
from .tenant_stores import RECORD_BYTES, TenantStores
from .wanted import NO_OUTCOME

# Vectors are as long as hidden states; where a model's files do not say that, this is assumed.
USUAL_SIZE = 4096
READ_AT_ONCE = 64

OPERATION = "embeddings"


@dataclass(frozen=True, slots=True)
class KeptInputs:
    """A stored request, and the vectors that there are of it by their requests' ids.

    `fresh`: it was stored by whoever asks. `running`: it runs here already.
    """

    stored: StoredRequest
    vectors: Mapping[str, bytes]
    fresh: bool = False
    running: bool = False

    @property
    def to_run(self) -> list[GenerateRequest]:
        """What is to be queued for whoever asks."""
        if self.running:
            return []
        return [each for each in self.stored.requests if each.request_id not in self.vectors]

    @property
    def new(self) -> bool:
        """Whether nothing of it was there before."""
        return self.fresh and not self.vectors


class KeptEmbeddings:
    """Raises ApiError, and BackendUnavailable where Redis cannot be reached."""

    def __init__(
        self,
        store: RequestStore,
        ledger: Ledger,
        client: Client,
        stores: TenantStores,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._client = client
        self._stores = stores
        self._clock = clock
        self._sessions: dict[str, EmbeddingSession] = {}

    async def keep(self, fresh: StoredRequest, item: Item) -> KeptInputs:
        """What is kept under its id now, which is counted as `item`.

        Raises what ended the one that was there before, where it would end so again.
        """
        known = await self._store.get(fresh.request_id)
        if known is None:
            known = await self._put(fresh, item)
        if known.name == fresh.name:
            return KeptInputs(fresh, {}, fresh=True)
        check_same(known, fresh)
        if known.name in self._sessions:
            return KeptInputs(known, {}, running=True)
        standings = await self._standings(known)
        failed = _failure(standings)
        if failed is not None and failed.failure not in NO_OUTCOME:
            raise RequestFailed(failed.failure, failed.message)
        vectors = _vectors(known, standings)
        if not self._must_begin_anew(known, standings):
            return KeptInputs(known, vectors)
        return await self._replace(known, fresh, vectors, item)

    def _must_begin_anew(self, stored: StoredRequest, standings: Sequence[Standing | None]) -> bool:
        """Whether an input has ended without its vector, or can no longer have one."""
        over = stored.requests[0].deadline_ms <= self._clock() * 1000
        return any(
            over if standing is None else standing.outcome is not None and not _vector(standing)
            for standing in standings
        )

    async def _replace(
        self,
        known: StoredRequest,
        fresh: StoredRequest,
        vectors: Mapping[str, bytes],
        item: Item,
    ) -> KeptInputs:
        """The fresh one, with those requests of the known one that have their vectors."""
        pairs = zip(known.requests, fresh.requests, strict=True)
        requests = tuple(old if old.request_id in vectors else new for old, new in pairs)
        merged = replace(fresh, requests=requests, generation=secrets.token_hex(8))
        stored = await self._put(merged, item, replaces=known)
        if stored.name != merged.name:
            vectors = _vectors(stored, await self._standings(stored))
            return KeptInputs(stored, vectors)
        return KeptInputs(merged, vectors, fresh=True)

    async def _put(
        self, fresh: StoredRequest, item: Item, replaces: StoredRequest | None = None
    ) -> StoredRequest:
        """Counted before it is written: what is sent at once must not fill Redis."""
        await self._stores.occupy(fresh.requests[0].tenant, item, "Idempotency-Key")
        return await self._store.put(fresh, replaces)

    async def forget(self, kept: KeptInputs) -> None:
        """One that is new and will not begin; where Redis is away, its key finds it again."""
        if not kept.new:
            return
        try:
            await self._store.remove(kept.stored)
            await self.vacate(kept.stored.request_id, kept.stored.requests[0].tenant)
        except BackendUnavailable:
            return

    async def vacate(self, request_id: str, tenant: str) -> None:
        """Its vectors are no longer kept for the tenant."""
        await self._stores.vacate(tenant, (Kind.EMBEDDINGS, Kind.LINE), request_id)

    def open(self, kept: KeptInputs, queued: Callable[[], None]) -> EmbeddingSession:
        """The session in which it runs. `queued` is called for each request put in the queue."""
        session = self._sessions.get(kept.stored.name)
        if session is None:
            session = EmbeddingSession(
                kept.stored,
                kept.vectors,
                self._client,
                self._store,
                clock=self._clock,
                queued=queued,
                refused=lambda: self.forget(kept),
                on_end=self._ended,
            )
            self._sessions[kept.stored.name] = session
        return session

    def _ended(self, session: EmbeddingSession) -> None:
        self._sessions.pop(session.stored.name, None)

    def close(self) -> None:
        """Leaves what runs here to other gateways."""
        for session in list(self._sessions.values()):
            session.close()

    async def cancel(self, stored: StoredRequest) -> None:
        """Ends it where it runs here."""
        session = self._sessions.get(stored.name)
        if session is not None:
            await session.cancel()

    async def view(self, stored: StoredRequest) -> tuple[View, Sequence[bytes]]:
        """Where it is; once it has completed, with its vectors."""
        standings = await self._standings(stored)
        failed = _failure(standings)
        if failed is not None:
            cancelled = failed.failure in CALLED_OFF
            error = to_api_error(RequestFailed(failed.failure, failed.message))
            status = "cancelled" if cancelled else "failed"
            return View(stored=stored, status=status, error=error), ()
        vectors = _vectors(stored, standings)
        if len(vectors) == len(stored.requests):
            found = [vectors[request.request_id] for request in stored.requests]
            return View(stored=stored, status="completed"), found
        if self._must_begin_anew(stored, standings):
            return View(stored=stored, status="failed", error=lost()), ()
        started = vectors or any(standing and standing.started for standing in standings)
        return View(stored=stored, status="in_progress" if started else "queued"), ()

    async def _standings(self, stored: StoredRequest) -> list[Standing | None]:
        found: list[Standing | None] = []
        for at in range(0, len(stored.requests), READ_AT_ONCE):
            some = stored.requests[at : at + READ_AT_ONCE]
            found += await asyncio.gather(
                *(self._ledger.standing(each.request_id, each.model) for each in some)
            )
        return found


def bytes_of(requests: Sequence[GenerateRequest], size: int | None) -> int:
    """What the answers to requests take in Redis at most; `size` is the length of vectors."""
    numbers = requests[0].pooling.dimensions if requests[0].pooling is not None else None
    vector = 4 * (numbers or size or USUAL_SIZE)
    return sum(vector + 4 * len(request.prompt_token_ids) + RECORD_BYTES for request in requests)


def _vector(standing: Standing | None) -> bytes | None:
    if standing is None or standing.outcome is None or not standing.outcome.choices:
        return None
    return standing.outcome.choices[0].embedding


def _vectors(stored: StoredRequest, standings: Sequence[Standing | None]) -> dict[str, bytes]:
    pairs = zip(stored.requests, map(_vector, standings), strict=True)
    return {request.request_id: vector for request, vector in pairs if vector is not None}


def _failure(standings: Sequence[Standing | None]) -> Failed | None:
    """The first one; of those, one that would come again."""
    failures = [
        standing.outcome.failed
        for standing in standings
        if standing is not None and standing.outcome is not None and standing.outcome.failed
    ]
    decisive = [failed for failed in failures if failed.failure not in NO_OUTCOME]
    return next(iter(decisive or failures), None)
