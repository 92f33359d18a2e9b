"""Requests that any gateway can serve: kept under an id, found again, looked at, cancelled.

Holds nothing itself: what is kept is in the store, the output in the queue's records, and what runs
here in the sessions.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from headrace_common.errors import BackendUnavailable, FailureCode, HeadraceError, RequestFailed
from headrace_common.messages import GenerateRequest
from headrace_common.protocol.accounts import Kind
from headrace_common.protocol.base import LOST_HELD_S, Outcome, Standing
from headrace_common.protocol.failures import CALLED_OFF
from headrace_common.protocol.store import RequestStore, StoredRequest

from .admission import Accepted
from .answers import Answer, AnswerOptions
from .answers_by_name import ANSWERS
from .errors import ApiError, to_api_error, unavailable
from .event_ids import REQUEST_ID
from .generation import Delta
from .models import ServedModel
from .output import OutputForm
from .ports import Ledger
from .run import Run, Usage
from .sessions import Sessions, sampling_of
from .sse import encode
from .tenant_stores import TenantStores, most_output, request_item
from .tenants import Reader
from .wanted import NO_OUTCOME
from .wishes import ID_CHARS, Wish, derived_id

# A stored request is not read again once this many gateways ended while they read it.
MAX_GATEWAYS = 3
# As what a request that is stored may be counted.
REQUEST_KINDS = (Kind.REQUEST, Kind.EMBEDDINGS, Kind.LINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Seconds: how long an outcome can be read, how long a request runs on without a client."""

    result: float
    window: float


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Where a kept request is: `queued`, `in_progress`, `completed`, `failed` or `cancelled`.

    `result` is its whole answer once it has completed; or `content`, where that was made as JSON.
    """

    stored: StoredRequest
    status: str
    result: Mapping[str, Any] | None = None
    error: ApiError | None = None
    content: bytes | None = None


class KeptRequests:
    """Raises ApiError, and BackendUnavailable where Redis cannot be reached."""

    def __init__(
        self,
        store: RequestStore,
        ledger: Ledger,
        sessions: Sessions,
        lifetimes: Lifetimes,
        stores: TenantStores,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._stores = stores
        self._ledger = ledger
        self._sessions = sessions
        self._lifetimes = lifetimes
        self._clock = clock

    def close(self) -> None:
        """Leaves what runs here to other gateways."""
        self._sessions.close()

    async def identify(self, wish: Wish, tenant: str) -> str:
        """The request's id: from its key, else random."""
        if wish.key is None:
            return secrets.token_hex(ID_CHARS // 2)
        return derived_id(await self._store.salt(), tenant, wish.key)

    def lasting(
        self, requests: Sequence[GenerateRequest], wish: Wish
    ) -> tuple[GenerateRequest, ...]:
        """The queue's requests as they must be to outlive their client."""
        keep = int(self._lifetimes.result * 1000)
        window = int(self._lifetimes.window * 1000)
        return tuple(
            replace(
                request,
                keep_ms=keep,
                window_ms=request.deadline_ms - request.created_ms if wish.background else window,
            )
            for request in requests
        )

    async def keep(self, fresh: StoredRequest, wish: Wish, kind: Kind) -> StoredRequest:
        """What is kept under its id now: this one, or the one that was there before.

        `kind` says as what it is counted.
        """
        known = None if wish.key is None else await self._store.get(fresh.request_id)
        if known is None:
            known = await self._put(fresh, kind)
        if known.name == fresh.name:
            return known
        check_same(known, fresh)
        if wish.last_event_id is None and await self._is_over_without_outcome(known):
            return await self._put(fresh, kind, replaces=known)
        return known

    async def _put(
        self, fresh: StoredRequest, kind: Kind, replaces: StoredRequest | None = None
    ) -> StoredRequest:
        """Counted before it is written: what is sent at once must not fill Redis."""
        tenant, item = fresh.requests[0].tenant, request_item(fresh, kind)
        await self._stores.occupy(tenant, item, later=most_output(fresh))
        return await self._store.put(fresh, replaces)

    async def _is_over_without_outcome(self, stored: StoredRequest) -> bool:
        standings = await self._standings(stored)
        if None in standings:  # not in the queue yet, unless that can no longer be
            return stored.requests[0].deadline_ms <= self._clock() * 1000
        return any(
            standing is not None
            and standing.outcome is not None
            and standing.outcome.failed is not None
            and standing.outcome.failed.failure in NO_OUTCOME
            for standing in standings
        )

    async def open(
        self, stored: StoredRequest, model: ServedModel, *, fresh: bool
    ) -> list[Accepted]:
        """The request for one more reader; a `fresh` one that is refused is forgotten again."""
        try:
            async with self._attending(stored):
                return await self._sessions.open(stored, model.tokenizer, fresh=fresh)
        except HeadraceError:
            if fresh:
                await self._forget(stored)
            raise

    async def _forget(self, stored: StoredRequest) -> None:
        try:
            await self._remove(stored)
        except BackendUnavailable:
            return  # the same key finds it again, and queues it then

    async def _remove(self, stored: StoredRequest) -> None:
        await self._store.remove(stored)
        await self._stores.vacate(stored.requests[0].tenant, REQUEST_KINDS, stored.request_id)

    async def find(self, request_id: str, reader: Reader) -> StoredRequest:
        """The request of that id, where the reader may have it."""
        stored = None
        if REQUEST_ID.fullmatch(request_id):
            stored = await self._store.get(request_id)
        if stored is None or not reader.may_read(stored.requests[0].tenant, [stored.model]):
            raise ApiError(
                404,
                "There is no request of this id, or it has expired: outcomes are kept for "
                f"{self._lifetimes.result:g} s. Send the request again.",
                code="request_not_found",
            )
        return stored

    async def reopen(self, stored: StoredRequest, model: ServedModel) -> list[Accepted]:
        """A request that was found, for one more reader. Never starts one that is lost."""
        if None in await self._standings(stored):
            raise being_restored() if await self._is_restored(stored) else lost()
        return await self.open(stored, model, fresh=False)

    async def cancel(self, stored: StoredRequest) -> None:
        """Ends it, wherever it waits or runs. Does nothing once it has ended."""
        await self._sessions.cancel(stored)
        for request in stored.requests:
            await self._ledger.cancel(request.request_id, request.model)

    async def view(self, stored: StoredRequest, model: ServedModel) -> View:
        """Where it is, with its answer once it has ended."""
        async with self._attending(stored):
            return await self._view(stored, model)

    @asynccontextmanager
    async def _attending(self, stored: StoredRequest) -> AsyncIterator[None]:
        """Its answer is made from what is stored within the block, unless too many gateways have
        ended of that."""
        gateway_id = self._ledger.gateway_id
        others = await self._store.attend(stored, gateway_id)
        try:
            await self._check_innocent(others)
            yield
        finally:
            await self._store.attended(stored, gateway_id)

    async def _check_innocent(self, others: Sequence[str]) -> None:
        if len(others) < MAX_GATEWAYS:
            return
        alive = [await self._ledger.gateway_alive(other) for other in others]
        if alive.count(False) >= MAX_GATEWAYS:
            raise to_api_error(
                RequestFailed(
                    FailureCode.POISONED,
                    f"{alive.count(False)} gateways ended while they read this request's answer; "
                    "it is not read again. Send another request, simpler or shorter.",
                )
            )

    async def _view(self, stored: StoredRequest, model: ServedModel) -> View:
        standings = await self._standings(stored)
        if _status(standings) == "completed":
            standings = await self._given(stored)
        status = _status(standings)
        outcomes = [standing.outcome for standing in standings if standing and standing.outcome]
        failed = next((outcome.failed for outcome in outcomes if outcome.failed), None)
        if failed is not None:
            error = to_api_error(RequestFailed(failed.failure, failed.message))
            return View(stored=stored, status=status, error=error)
        if None in standings and await self._is_restored(stored):
            return View(stored=stored, status="in_progress")
        if None in standings:
            return View(stored=stored, status=status, error=lost())
        result = await _result(stored, model, outcomes) if status == "completed" else None
        return View(stored=stored, status=status, result=result)

    async def _is_restored(self, stored: StoredRequest) -> bool:
        """Whether a gateway has it, or had just now, which queues it again where Redis lost it."""
        young = self._clock() - stored.created < LOST_HELD_S
        return young or await self._store.wanted(stored.request_id) > 0

    async def forget(self, stored: StoredRequest) -> None:
        """Its answer is kept elsewhere now."""
        await self._ledger.forget([each.request_id for each in stored.requests], stored.queue)
        await self._remove(stored)

    async def delete(self, stored: StoredRequest) -> None:
        """Ends it and forgets it, with its output where it had ended."""
        standings = zip(stored.requests, await self._standings(stored), strict=True)
        ended = [each.request_id for each, standing in standings if standing and standing.outcome]
        await self.cancel(stored)
        if ended:
            await self._ledger.forget(ended, stored.queue)
        await self._remove(stored)

    async def _given(self, stored: StoredRequest) -> list[Standing | None]:
        """Where it is, for somebody who is given its answer."""
        return await asyncio.gather(
            *(self._ledger.give_out(each.request_id, each.model) for each in stored.requests)
        )

    async def _standings(self, stored: StoredRequest) -> list[Standing | None]:
        return await asyncio.gather(
            *(self._ledger.standing(each.request_id, each.model) for each in stored.requests)
        )


def check_same(known: StoredRequest, fresh: StoredRequest) -> None:
    """Raises ApiError where one key was used for two bodies."""
    if known.fingerprint != fresh.fingerprint:
        raise ApiError(
            422,
            "Idempotency-Key: was used for a request with another body. Use a new key for "
            "another request.",
            param="Idempotency-Key",
            code="idempotency_key_reused",
            headers={"x-should-retry": "false"},
        )


def request_body(view: View) -> dict[str, Any]:
    """What GET /v1/requests/{id} says."""
    stored = view.stored
    return {
        "id": stored.request_id,
        "object": "request",
        "operation": stored.operation,
        "model": stored.model,
        "status": view.status,
        "background": stored.background,
        "created_at": stored.created,
        "expires_at": stored.expires_ms // 1000,
        "result": view.result,
        "error": None if view.error is None else view.error.body["error"],
    }


def request_content(view: View) -> bytes:
    """The same as JSON."""
    body = request_body(view)
    if view.content is None:
        return encode(body)
    del body["result"]
    return encode(body)[:-1] + b',"result":' + view.content + b"}"


def answer_of(stored: StoredRequest, model: ServedModel) -> Answer:
    """An empty answer of the shape that was asked for."""
    sampling = stored.requests[0].sampling
    prompts = tuple(request.prompt_token_ids for request in stored.requests)
    options = AnswerOptions(
        answer_id=stored.request_id,
        model=stored.model,
        system_fingerprint=model.system_fingerprint,
        created=stored.created,
        tokenizer=model.tokenizer,
        choices=sampling.n * len(stored.requests),
        choices_per_prompt=sampling.n,
        logprobs=sampling.logprobs,
        include_usage=stored.include_usage,
        prompts=prompts if stored.return_token_ids else None,
        prompt=prompts[0],
        form=OutputForm.decode(stored.form),
    )
    return ANSWERS[stored.operation](options)


def lost() -> ApiError:
    """What is said where Redis has lost what is asked for."""
    return ApiError(
        410,
        "The request's state is lost. Send it again.",
        kind="server_error",
        code="state_lost",
        headers={"x-should-retry": "false"},
    )


def being_restored() -> ApiError:
    """What is said where Redis has lost what another gateway has."""
    return unavailable("The request's state is being restored; try again.", code="state_lost")


def _status(standings: Sequence[Standing | None]) -> str:
    known = [standing for standing in standings if standing is not None]
    failures = [each.outcome.failed for each in known if each.outcome and each.outcome.failed]
    if any(failure.failure in CALLED_OFF for failure in failures):
        return "cancelled"
    if failures or len(known) < len(standings):
        return "failed"
    if all(each.outcome is not None for each in known):
        return "completed"
    return "in_progress" if any(each.started for each in known) else "queued"


async def _result(
    stored: StoredRequest, model: ServedModel, outcomes: Sequence[Outcome]
) -> Mapping[str, Any]:
    """The whole answer, made from outcomes."""
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

    async def stop_choice(self, choice: int) -> None:
        """It has ended."""

    async def cancel(self) -> None:
        """It has ended."""

    def leave(self) -> None:
        """It has ended."""
