"""Requests that any gateway can serve: stored under an id, found, viewed, cancelled.

It has no state of its own: requests are in the store, outputs in the queue's records, and running
requests in the sessions.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from headrace_common.errors import BackendUnavailable, FailureCode, HeadraceError, RequestFailed
from headrace_common.protocol.accounts import ItemKind
from headrace_common.protocol.base import LOST_RESERVED_S, Outcome, RequestStatus
from headrace_common.protocol.failures import CALLED_OFF
from headrace_common.protocol.store import RequestStore, StoredRequest
from headrace_common.wire.messages import GenerateRequest

from ..errors import NO_RETRY, ApiError, to_api_error, unavailable
from ..limits.tenant_stores import TenantStores, most_output, request_item
from ..limits.tenants import ReadAccess
from ..models.models import ServedModel
from ..openai.answers import Answer
from ..parsing.output import OutputForm
from ..queue_client.generation import Delta
from ..queue_client.ports import RequestDirectory
from ..queue_client.run import Accepted, Run, Usage, cancel_all
from ..streaming.sse import encode
from .answer_factory import make_answer
from .event_ids import REQUEST_ID
from .idempotency import ID_CHARS, ResumeOptions, derived_id
from .presence import NO_OUTCOME
from .sessions import Sessions, sampling_of

# A stored request is not read again once this many gateways ended while they read it.
MAX_GATEWAYS = 3
# The kinds of store items that a stored request may count as.
REQUEST_KINDS = (ItemKind.REQUEST, ItemKind.EMBEDDINGS, ItemKind.LINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Seconds for which an outcome can be read, and for which a request runs without a client."""

    result: float
    window: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSnapshot:
    """The state of a stored request: queued, in_progress, completed, failed or cancelled.

    `result` is its whole answer once it has completed, or `content` if that was made as JSON.
    """

    stored: StoredRequest
    status: str
    result: Mapping[str, Any] | None = None
    error: ApiError | None = None
    content: bytes | None = None


class StoredRequests:
    """Stores requests. Raises ApiError, and BackendUnavailable if Redis is unreachable."""

    def __init__(
        self,
        store: RequestStore,
        request_directory: RequestDirectory,
        sessions: Sessions,
        lifetimes: Lifetimes,
        stores: TenantStores,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._stores = stores
        self._request_directory = request_directory
        self._sessions = sessions
        self._lifetimes = lifetimes
        self._clock = clock

    def close(self) -> None:
        """Stops the sessions of this gateway, so that other gateways continue their requests."""
        self._sessions.close()

    async def identify(self, resume: ResumeOptions, tenant: str) -> str:
        """Returns the request's id: derived from its key, else random."""
        if resume.key is None:
            return secrets.token_hex(ID_CHARS // 2)
        return derived_id(await self._store.salt(), tenant, resume.key)

    def lasting(
        self, requests: Sequence[GenerateRequest], resume: ResumeOptions
    ) -> tuple[GenerateRequest, ...]:
        """Returns the queue's requests with the lifetimes that let them outlive their client."""
        keep = int(self._lifetimes.result * 1000)
        window = int(self._lifetimes.window * 1000)
        return tuple(
            replace(
                request,
                keep_ms=keep,
                window_ms=request.deadline_ms - request.created_ms if resume.background else window,
            )
            for request in requests
        )

    async def keep(
        self, fresh: StoredRequest, resume: ResumeOptions, kind: ItemKind
    ) -> StoredRequest:
        """Stores a request, or finds the one stored under its id, and returns it. Counts it as
        `kind`."""
        known = None if resume.key is None else await self._store.get(fresh.request_id)
        if known is None:
            known = await self._put(fresh, kind)
        if known.name == fresh.name:
            return known
        check_same(known, fresh)
        if resume.last_event_id is None and await self._is_over_without_outcome(known):
            return await self._put(fresh, kind, replaces=known)
        return known

    async def _put(
        self, fresh: StoredRequest, kind: ItemKind, replaces: StoredRequest | None = None
    ) -> StoredRequest:
        """Counts the request before it stores it, so that concurrent requests cannot fill Redis."""
        tenant, item = fresh.requests[0].tenant, request_item(fresh, kind)
        await self._stores.occupy(tenant, item, later=most_output(fresh))
        return await self._store.put(fresh, replaces)

    async def _is_over_without_outcome(self, stored: StoredRequest) -> bool:
        statuses = await self._statuses(stored)
        if None in statuses:  # not queued yet; after its deadline it never will be
            return stored.requests[0].deadline_ms <= self._clock() * 1000
        return any(
            request_status is not None
            and request_status.outcome is not None
            and request_status.outcome.failed is not None
            and request_status.outcome.failed.failure in NO_OUTCOME
            for request_status in statuses
        )

    async def open(
        self, stored: StoredRequest, model: ServedModel, *, fresh: bool
    ) -> list[Accepted]:
        """Returns the requests for one more reader; a `fresh` request that is refused is
        removed."""
        accepted: list[Accepted] = []
        try:
            async with self._reading(stored):
                accepted = await self._sessions.open(stored, model.tokenizer, fresh=fresh)
        except BaseException as error:
            await cancel_all(accepted)
            if fresh and isinstance(error, HeadraceError):
                await self._forget(stored)
            raise
        return accepted

    async def _forget(self, stored: StoredRequest) -> None:
        try:
            await self._remove(stored)
        except BackendUnavailable:
            return  # a client with the same key finds the request again and queues it

    async def _remove(self, stored: StoredRequest) -> None:
        await self._store.remove(stored)
        await self._stores.vacate(stored.requests[0].tenant, REQUEST_KINDS, stored.request_id)

    async def find(self, request_id: str, access: ReadAccess) -> StoredRequest:
        """Returns the request with that id. Raises ApiError if the caller may not read it."""
        stored = None
        if REQUEST_ID.fullmatch(request_id):
            stored = await self._store.get(request_id)
        if stored is None or not access.permits(stored.requests[0].tenant, [stored.model]):
            raise ApiError(
                404,
                "There is no request with this id, or it has expired: outcomes are stored for "
                f"{self._lifetimes.result:g} s. Send the request again.",
                code="request_not_found",
            )
        return stored

    async def reopen(self, stored: StoredRequest, model: ServedModel) -> list[Accepted]:
        """Returns a found request for one more access. Never starts one that is lost."""
        if None in await self._statuses(stored):
            raise being_restored() if await self._is_restored(stored) else lost()
        return await self.open(stored, model, fresh=False)

    async def cancel(self, stored: StoredRequest) -> None:
        """Ends the request, waiting or running. Does nothing if it has ended."""
        await self._sessions.cancel(stored)
        for request in stored.requests:
            await self._request_directory.cancel(request.request_id, request.model)

    async def snapshot(self, stored: StoredRequest, model: ServedModel) -> RequestSnapshot:
        """Returns the request's state, and its answer once it has ended."""
        async with self._reading(stored):
            return await self._snapshot(stored, model)

    @asynccontextmanager
    async def _reading(self, stored: StoredRequest) -> AsyncIterator[None]:
        """Notes that this gateway reads the stored request within the block.

        Raises ApiError if too many gateways have ended while they read it.
        """
        gateway_id = self._request_directory.gateway_id
        others = await self._store.begin_read(stored, gateway_id)
        try:
            await self._check_ended_readers(others)
            yield
        finally:
            await self._store.end_read(stored, gateway_id)

    async def _check_ended_readers(self, others: Sequence[str]) -> None:
        if len(others) < MAX_GATEWAYS:
            return
        alive = [await self._request_directory.gateway_alive(other) for other in others]
        if alive.count(False) >= MAX_GATEWAYS:
            raise to_api_error(
                RequestFailed(
                    FailureCode.POISONED,
                    f"{alive.count(False)} gateways ended while they read this request's answer; "
                    "it is not read again. Send another request, simpler or shorter.",
                )
            )

    async def _snapshot(self, stored: StoredRequest, model: ServedModel) -> RequestSnapshot:
        statuses = await self._statuses(stored)
        if _status(statuses) == "completed":
            statuses = await self._deliver(stored)
        status = _status(statuses)
        outcomes = [
            request_status.outcome
            for request_status in statuses
            if request_status and request_status.outcome
        ]
        failed = next((outcome.failed for outcome in outcomes if outcome.failed), None)
        if failed is not None:
            error = to_api_error(RequestFailed(failed.failure, failed.message))
            return RequestSnapshot(stored=stored, status=status, error=error)
        if None in statuses and await self._is_restored(stored):
            return RequestSnapshot(stored=stored, status="in_progress")
        if None in statuses:
            return RequestSnapshot(stored=stored, status=status, error=lost())
        result = await _result(stored, model, outcomes) if status == "completed" else None
        return RequestSnapshot(stored=stored, status=status, result=result)

    async def _is_restored(self, stored: StoredRequest) -> bool:
        """Whether a gateway serves the request, or did just now: it queues it again if Redis lost
        it."""
        young = self._clock() - stored.created < LOST_RESERVED_S
        return young or await self._store.presence_left(stored.request_id) > 0

    async def forget(self, stored: StoredRequest) -> None:
        """Removes the request's answer, which is stored elsewhere now."""
        await self._request_directory.forget(
            [each.request_id for each in stored.requests], stored.queue
        )
        await self._remove(stored)

    async def delete(self, stored: StoredRequest) -> None:
        """Ends and removes the request, with its output if it had ended."""
        statuses = zip(stored.requests, await self._statuses(stored), strict=True)
        ended = [
            each.request_id
            for each, request_status in statuses
            if request_status and request_status.outcome
        ]
        await self.cancel(stored)
        if ended:
            await self._request_directory.forget(ended, stored.queue)
        await self._remove(stored)

    async def _deliver(self, stored: StoredRequest) -> list[RequestStatus | None]:
        """Returns the statuses, and notes that a client gets the answer."""
        return await asyncio.gather(
            *(
                self._request_directory.deliver_outcome(each.request_id, each.model)
                for each in stored.requests
            )
        )

    async def _statuses(self, stored: StoredRequest) -> list[RequestStatus | None]:
        return await asyncio.gather(
            *(
                self._request_directory.request_status(each.request_id, each.model)
                for each in stored.requests
            )
        )


def check_same(known: StoredRequest, fresh: StoredRequest) -> None:
    """Raises ApiError if one key was used for two bodies."""
    if known.fingerprint != fresh.fingerprint:
        raise ApiError(
            422,
            "Idempotency-Key: was used for a request with another body. Use a new key for "
            "another request.",
            param="Idempotency-Key",
            code="idempotency_key_reused",
            headers=NO_RETRY,
        )


def request_body(snapshot: RequestSnapshot) -> dict[str, Any]:
    """Returns the body of GET /v1/requests/{id}."""
    stored = snapshot.stored
    return {
        "id": stored.request_id,
        "object": "request",
        "operation": stored.operation,
        "model": stored.model,
        "status": snapshot.status,
        "background": stored.background,
        "created_at": stored.created,
        "expires_at": stored.expires_ms // 1000,
        "result": snapshot.result,
        "error": None if snapshot.error is None else snapshot.error.body["error"],
    }


def request_content(snapshot: RequestSnapshot) -> bytes:
    """Returns the same body as JSON."""
    body = request_body(snapshot)
    if snapshot.content is None:
        return encode(body)
    del body["result"]
    return encode(body)[:-1] + b',"result":' + snapshot.content + b"}"


def answer_of(stored: StoredRequest, model: ServedModel) -> Answer:
    """Returns an empty answer in the form that was asked for."""
    return make_answer(
        stored.operation,
        stored.requests,
        model,
        answer_id=stored.request_id,
        include_usage=stored.include_usage,
        shows_ids=stored.return_token_ids,
        form=OutputForm.decode(stored.form),
    )


def lost() -> ApiError:
    """Returns the error for a request that Redis has lost."""
    return ApiError(
        410,
        "The request's state is lost. Send it again.",
        kind="server_error",
        code="state_lost",
        headers=NO_RETRY,
    )


def being_restored() -> ApiError:
    """Returns the error for a request that Redis has lost and another gateway has."""
    return unavailable("The request's state is being restored; try again.", code="state_lost")


def _status(statuses: Sequence[RequestStatus | None]) -> str:
    known = [request_status for request_status in statuses if request_status is not None]
    failures = [each.outcome.failed for each in known if each.outcome and each.outcome.failed]
    if any(failure.failure in CALLED_OFF for failure in failures):
        return "cancelled"
    if failures or len(known) < len(statuses):
        return "failed"
    if all(each.outcome is not None for each in known):
        return "completed"
    return "in_progress" if any(each.started for each in known) else "queued"


async def _result(
    stored: StoredRequest, model: ServedModel, outcomes: Sequence[Outcome]
) -> Mapping[str, Any]:
    """Returns the whole answer, made from outcomes."""
    answer, usage, sampling = answer_of(stored, model), Usage(), sampling_of(stored)
    for index, (request, outcome) in enumerate(zip(stored.requests, outcomes, strict=True)):
        accepted = Accepted(request, sampling, _Ended(outcome))
        run = Run(accepted, model.tokenizer, index * sampling.n)
        async for piece in run.pieces():
            answer.add(piece)
        usage.add(run.usage)
    return answer.whole(usage)


class _Ended:
    """A stored outcome as a generation."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for number, choice in enumerate(self._outcome.choices):
            yield Delta(
                choice=number,
                token_ids=choice.token_ids,
                logprobs=choice.logprobs,
                finish_reason=choice.finish_reason,
                stop_token=choice.stop_token,
                cached_tokens=self._outcome.cached_tokens,
            )

    async def stop_choice(self, choice: int, tokens: int) -> None:
        """Does nothing: it has ended."""

    async def cancel(self) -> None:
        """Does nothing: it has ended."""

    def leave(self) -> None:
        """Does nothing: it has ended."""
