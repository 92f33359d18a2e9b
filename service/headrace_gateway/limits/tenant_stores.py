"""Limits what tenants may store in Redis: counted before it is written, refused if it is too much.

Requests that are answered at once are not counted: they continue while a tenant's store is full,
and while all stores together have used their share of Redis' memory.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.accounts import (
    Accounts,
    Bound,
    Item,
    ItemKind,
    Quota,
    QuotaExceeded,
    StoreMemory,
)
from headrace_common.protocol.store import StoredRequest, encode_stored

from ..errors import INVALID_REQUEST, NO_RETRY, ApiError, unavailable

# Bytes that a record takes in Redis in addition to its content, measured on Valkey 9: the request's
# record, the allocator's rounding, and its place in indexes.
RECORD_BYTES = 1536
TOKEN_BYTES = 4
LOGPROB_BYTES = 20
# Output tokens of a request that names no length, if the model's length is not known either.
USUAL_OUTPUT = 4096
# A measurement of Redis' memory is used for MEASURE_S seconds. Bytes that were counted are in each
# measurement from WRITTEN_S seconds later on.
MEASURE_S = 0.25
WRITTEN_S = 2.0
LINE_RETRY_S = 1.0
_WORDS = {
    ItemKind.REQUEST: "stored requests",
    ItemKind.EMBEDDINGS: "embeddings",
    ItemKind.LINE: "running batch lines",
    ItemKind.FILE: "files",
    ItemKind.BATCH: "batches and their results",
}
FILES_FULL = "file_storage_full"
LIMITED = "rate_limit_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bytes and counts of one tenant, and all stores' share of Redis' memory."""

    tenant_bytes: int
    requests: int
    embedding_bytes: int
    file_bytes: int
    files: int
    memory_share: float

    def quota(self, kind: ItemKind) -> Quota:
        match kind:
            case ItemKind.REQUEST:
                return Quota(max_bytes=self.tenant_bytes, kind_items=self.requests)
            case ItemKind.EMBEDDINGS | ItemKind.LINE:
                return Quota(max_bytes=self.tenant_bytes, kind_bytes=self.embedding_bytes)
            case ItemKind.FILE:
                return Quota(
                    max_bytes=self.tenant_bytes,
                    kind_bytes=self.file_bytes,
                    kind_items=self.files,
                )
            case ItemKind.BATCH:
                return Quota(max_bytes=self.tenant_bytes)


class MemoryHeadroom:
    """The memory of Redis that is left for all tenants' stores, as one gateway sees it."""

    def __init__(
        self,
        memory: Callable[[], Awaitable[StoreMemory]],
        share: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = memory
        self._share = share
        self._clock = clock
        self._memory = StoreMemory(0, 0)
        self._read_at = -MEASURE_S
        self._reading = asyncio.Lock()
        self._taken: deque[tuple[float, int]] = deque()

    async def take(self, size: int) -> bool:
        """Returns whether `size` more bytes fit, and counts them."""
        async with self._reading:
            if self._clock() - self._read_at >= MEASURE_S:
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
    """Counts what tenants store. `memory` reads Redis' memory; `clock` gives Unix seconds of Redis.

    Raises ApiError, and BackendUnavailable if Redis is unreachable.
    """

    def __init__(
        self,
        accounts: Accounts,
        limits: StoreLimits,
        memory: Callable[[], Awaitable[StoreMemory]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._accounts = accounts
        self._headroom = MemoryHeadroom(memory, limits.memory_share)
        self._clock = clock

    async def occupy(
        self, tenant: str, item: Item, param: str | None = None, *, later: int = 0
    ) -> None:
        """Counts an item that a tenant is about to store; `later` of its bytes are written later.

        `param` names the item in the refusal.
        """
        account = _account(tenant)
        refused = await self._accounts.occupy(account, item, self.limits.quota(item.kind))
        if refused is not None:
            raise self._refusal(item, refused, param)
        if not await self._headroom.take(item.size - later):
            await self._accounts.vacate(account, [(item.kind, item.name)])
            raise _store_full()

    async def count(self, tenant: str, item: Item) -> None:
        """Counts an item without a limit."""
        await self._accounts.occupy(_account(tenant), item, Quota())

    async def used(self, tenant: str) -> int:
        """Returns the bytes that a tenant stores."""
        return sum((await self._accounts.used(_account(tenant))).values())

    async def vacate(self, tenant: str, kinds: Sequence[ItemKind], name: str) -> None:
        """Stops counting an item of one of these kinds."""
        await self._accounts.vacate(_account(tenant), [(kind, name) for kind in kinds])

    async def settle(self, stored: StoredRequest, output_bytes: int) -> None:
        """Counts the real size of a request that has ended, instead of the largest possible one."""
        size = _record_bytes(stored) + len(encode_stored(stored)) + output_bytes
        item = Item(ItemKind.REQUEST, stored.request_id, size, stored.expires_ms)
        try:
            await self._accounts.resize(_account(stored.requests[0].tenant), item)
        except BackendUnavailable:
            return  # it counts with its maximal size until it expires

    def _refusal(self, item: Item, refused: QuotaExceeded, param: str | None) -> ApiError:
        if item.kind is ItemKind.LINE and refused.used[ItemKind.LINE]:
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
        embeddings = item.kind is ItemKind.EMBEDDINGS
        return ApiError(
            400 if embeddings else 413,
            f"{begin}up to {item.size} bytes of {_WORDS[item.kind]} would have to be stored, over "
            f"the limit of {most}. Send fewer inputs, a smaller max_tokens, n or top_logprobs, or "
            "a request that is not stored.",
            param=param,
            code=None if embeddings else "request_too_large",
            headers=NO_RETRY,
        )

    def _full_error(
        self,
        item: Item,
        refused: QuotaExceeded,
        param: str | None,
        *,
        retry_after: float,
        final: bool,
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
            headers=NO_RETRY if final else None,
        )

    def _bound(self, item: Item, refused: QuotaExceeded) -> tuple[str, str, str]:
        """Returns the limit, its setting, and the code of the refusal."""
        quota, words = self.limits.quota(item.kind), _WORDS[item.kind]
        if refused.bound is Bound.BYTES:
            return f"{quota.max_bytes} bytes", "max_tenant_store_bytes", "tenant_store_full"
        of_bytes = refused.bound is Bound.KIND_BYTES
        bound = (
            f"{quota.kind_bytes} bytes of {words}" if of_bytes else f"{quota.kind_items} {words}"
        )
        if item.kind is ItemKind.FILE:
            setting = "max_stored_bytes" if of_bytes else "max_stored_files"
            return bound, setting, FILES_FULL
        if item.kind is ItemKind.REQUEST:
            return bound, "max_stored_requests", "tenant_store_full"
        return bound, "max_kept_embedding_bytes", "kept_embeddings_full"


def _store_full() -> ApiError:
    return unavailable(
        "The server's store is full: the rest of its memory is reserved for requests "
        "that are answered at once. Send the request without Idempotency-Key, x-resumable and "
        "background, with store: false, or try again later.",
        code="store_full",
        retry_after=30.0,
    )


def request_item(stored: StoredRequest, kind: ItemKind) -> Item:
    """Returns the item of a stored request, with the most bytes that it can take."""
    content = len(encode_stored(stored))
    waiting = content  # the engines' copy exists until the request's end
    size = _record_bytes(stored) + content + waiting + most_output(stored)
    return Item(kind, stored.request_id, size, stored.expires_ms)


def most_output(stored: StoredRequest) -> int:
    """Returns the most bytes of a request's output."""
    return sum(
        request.sampling.branches
        * (request.sampling.max_tokens or USUAL_OUTPUT)
        * token_bytes(request.sampling.logprobs)
        for request in stored.requests
    )


def token_bytes(logprobs: int | None) -> int:
    """Returns the bytes of an output token with its log probabilities."""
    return TOKEN_BYTES if logprobs is None else TOKEN_BYTES + LOGPROB_BYTES * (1 + logprobs)


def _record_bytes(stored: StoredRequest) -> int:
    return RECORD_BYTES * len(stored.requests)


def _account(tenant: str) -> str:
    return f"s.{tenant}"
