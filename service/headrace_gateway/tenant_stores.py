"""What tenants may leave in Redis: counted before it is written, refused where it is too much.

Requests that are answered at once do not come here: they go on while a tenant's store is full, and
while all stores together have taken their share of Redis' memory.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.accounts import Accounts, Bound, Full, Item, Kind, Memory, Quota
from headrace_common.protocol.store import StoredRequest, encode_stored

from .errors import INVALID_REQUEST, ApiError, unavailable

# What a record takes in Redis beside its content, measured on Valkey 9: the request's record, what
# an allocator rounds up, and its place in indexes.
RECORD_BYTES = 1536
TOKEN_BYTES = 4
LOGPROB_BYTES = 20
# The output of a request that names no length, where the model's is not known either.
USUAL_OUTPUT = 4096
# How long a reading of Redis' memory serves, and how long what was taken may not be in it yet.
LOOK_S = 0.25
WRITTEN_S = 2.0
LINE_RETRY_S = 1.0
_WORDS = {
    Kind.REQUEST: "stored requests",
    Kind.EMBEDDINGS: "embeddings",
    Kind.LINE: "running batch lines",
    Kind.FILE: "files",
    Kind.BATCH: "batches and their results",
}
FILES_FULL = "file_storage_full"
LIMITED = "rate_limit_error"
_FINAL = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bytes and counts of one tenant, and the share of Redis' memory of all stores together."""

    tenant_bytes: int
    requests: int
    embedding_bytes: int
    file_bytes: int
    files: int
    memory_share: float

    def quota(self, kind: Kind) -> Quota:
        match kind:
            case Kind.REQUEST:
                return Quota(max_bytes=self.tenant_bytes, kind_items=self.requests)
            case Kind.EMBEDDINGS | Kind.LINE:
                return Quota(max_bytes=self.tenant_bytes, kind_bytes=self.embedding_bytes)
            case Kind.FILE:
                return Quota(
                    max_bytes=self.tenant_bytes,
                    kind_bytes=self.file_bytes,
                    kind_items=self.files,
                )
            case Kind.BATCH:
                return Quota(max_bytes=self.tenant_bytes)


class Room:
    """What is left of Redis' memory for the stores of all tenants, as one gateway sees it."""

    def __init__(
        self,
        memory: Callable[[], Awaitable[Memory]],
        share: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = memory
        self._share = share
        self._clock = clock
        self._memory = Memory(0, 0)
        self._read_at = -LOOK_S
        self._reading = asyncio.Lock()
        self._taken: deque[tuple[float, int]] = deque()

    async def take(self, size: int) -> bool:
        """Whether there is room for `size` bytes, which are written now."""
        async with self._reading:
            if self._clock() - self._read_at >= LOOK_S:
                self._memory = await self._read()
                self._read_at = self._clock()
        now = self._clock()
        while self._taken and now - self._taken[0][0] >= WRITTEN_S:
            self._taken.popleft()
        recent = sum(taken for _, taken in self._taken)
        most = self._memory.most
        if most and self._memory.used + recent + size > self._share * most:
            return False
        self._taken.append((now, size))
        return True


class TenantStores:
    """Counts what tenants leave. `memory` reads Redis'; `clock` gives Unix seconds of Redis.

    Raises ApiError, and BackendUnavailable where Redis cannot be reached.
    """

    def __init__(
        self,
        accounts: Accounts,
        limits: StoreLimits,
        memory: Callable[[], Awaitable[Memory]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._accounts = accounts
        self._room = Room(memory, limits.memory_share)
        self._clock = clock

    async def occupy(
        self, tenant: str, item: Item, param: str | None = None, *, later: int = 0
    ) -> None:
        """Counts what a tenant is about to leave, of which `later` bytes are not written at once.

        `param` names it in the refusal.
        """
        account = _account(tenant)
        refused = await self._accounts.occupy(account, item, self.limits.quota(item.kind))
        if refused is not None:
            raise self._refusal(item, refused, param)
        if not await self._room.take(item.size - later):
            await self._accounts.vacate(account, [(item.kind, item.name)])
            raise _no_room()

    async def count(self, tenant: str, item: Item) -> None:
        """Counts what a tenant leaves in any case."""
        await self._accounts.occupy(_account(tenant), item, Quota())

    async def used(self, tenant: str) -> int:
        """The bytes that a tenant leaves."""
        return sum((await self._accounts.used(_account(tenant))).values())

    async def vacate(self, tenant: str, kinds: Sequence[Kind], name: str) -> None:
        """That of these kinds is left no longer."""
        await self._accounts.vacate(_account(tenant), [(kind, name) for kind in kinds])

    async def settle(self, stored: StoredRequest, output_bytes: int) -> None:
        """Counts what a request has come to, which has ended; before, it was the most possible."""
        size = _record_bytes(stored) + len(encode_stored(stored)) + output_bytes
        item = Item(Kind.REQUEST, stored.request_id, size, stored.expires_ms)
        try:
            await self._accounts.resize(_account(stored.requests[0].tenant), item)
        except BackendUnavailable:
            return  # it counts for more than it takes until it lapses

    def _refusal(self, item: Item, refused: Full, param: str | None) -> ApiError:
        if item.kind is Kind.LINE and refused.used[Kind.LINE]:
            return self._full_error(item, refused, param, retry_after=LINE_RETRY_S, final=False)
        if self._never_fits(item):
            return self._too_large(item, param)
        wait = refused.lapses_ms / 1000 - self._clock()
        return self._full_error(item, refused, param, retry_after=max(wait, 1.0), final=True)

    def _never_fits(self, item: Item) -> bool:
        quota = self.limits.quota(item.kind)
        return any(
            most is not None and item.size > most for most in (quota.max_bytes, quota.kind_bytes)
        )

    def _too_large(self, item: Item, param: str | None) -> ApiError:
        quota = self.limits.quota(item.kind)
        most = min(each for each in (quota.max_bytes, quota.kind_bytes) if each is not None)
        begin = "" if param is None else f"{param}: "
        embeddings = item.kind is Kind.EMBEDDINGS
        return ApiError(
            400 if embeddings else 413,
            f"{begin}up to {item.size} bytes of {_WORDS[item.kind]} would have to be stored, over "
            f"the limit of {most}. Send fewer inputs, a smaller max_tokens, n or top_logprobs, or "
            "a request that is not stored.",
            param=param,
            code=None if embeddings else "request_too_large",
            headers=_FINAL,
        )

    def _full_error(
        self, item: Item, refused: Full, param: str | None, *, retry_after: float, final: bool
    ) -> ApiError:
        bound, setting, code = self._bound(item, refused)
        begin = "" if param is None else f"{param}: "
        used = ", ".join(f"{size} of {_WORDS[kind]}" for kind, size in refused.used.items() if size)
        status, error_type = (413, INVALID_REQUEST) if code == FILES_FULL else (429, LIMITED)
        return ApiError(
            status,
            f"{begin}with {item.size} bytes more this tenant would be over the limit of {bound} "
            f"({setting}). Bytes that are stored: {used or 'none'}. Delete files (DELETE "
            "/v1/files/{id}) or responses (DELETE /v1/responses/{id}), wait until something "
            "expires, or send requests without Idempotency-Key, x-resumable and background, with "
            "store: false.",
            kind=error_type,
            param=param,
            code=code,
            retry_after=retry_after,
            headers=_FINAL if final else None,
        )

    def _bound(self, item: Item, refused: Full) -> tuple[str, str, str]:
        """The limit, its setting, and the code of the refusal."""
        quota, words = self.limits.quota(item.kind), _WORDS[item.kind]
        if refused.bound is Bound.BYTES:
            return f"{quota.max_bytes} bytes", "max_tenant_store_bytes", "tenant_store_full"
        of_bytes = refused.bound is Bound.KIND_BYTES
        bound = (
            f"{quota.kind_bytes} bytes of {words}" if of_bytes else f"{quota.kind_items} {words}"
        )
        if item.kind is Kind.FILE:
            setting = "max_stored_bytes" if of_bytes else "max_stored_files"
            return bound, setting, FILES_FULL
        if item.kind is Kind.REQUEST:
            return bound, "max_stored_requests", "tenant_store_full"
        return bound, "max_kept_embedding_bytes", "kept_embeddings_full"


def _no_room() -> ApiError:
    return unavailable(
        "The server stores nothing more at present: what is left of its memory is for requests "
        "that are answered at once. Send the request without Idempotency-Key, x-resumable and "
        "background, with store: false, or try again later.",
        code="store_full",
        retry_after=30.0,
    )


def request_item(stored: StoredRequest, kind: Kind) -> Item:
    """A request that is stored, with the most that it can come to take."""
    content = len(encode_stored(stored))
    waiting = content  # what engines read of it lies beside it until its end
    size = _record_bytes(stored) + content + waiting + most_output(stored)
    return Item(kind, stored.request_id, size, stored.expires_ms)


def most_output(stored: StoredRequest) -> int:
    """The most bytes that a request's output can take."""
    return sum(
        request.sampling.branches
        * (request.sampling.max_tokens or USUAL_OUTPUT)
        * token_bytes(request.sampling.logprobs)
        for request in stored.requests
    )


def token_bytes(logprobs: int | None) -> int:
    """What a token of the output takes with its log probabilities."""
    return TOKEN_BYTES if logprobs is None else TOKEN_BYTES + LOGPROB_BYTES * (1 + logprobs)


def _record_bytes(stored: StoredRequest) -> int:
    return RECORD_BYTES * len(stored.requests)


def _account(tenant: str) -> str:
    return f"s.{tenant}"
