"""Answers requests that outlive their connection: new ones, repeated ones, and by their id."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.responses import Response

from headrace_common.protocol.accounts import ItemKind
from headrace_common.protocol.store import StoredRequest
from headrace_common.wire.keys import DEFAULT_SHARD
from headrace_common.wire.messages import GenerateRequest

from ..errors import ApiError, invalid
from ..limits.tenants import ReadAccess
from ..models.models import Models, ServedModel
from ..openai.answers import Answer
from ..queue_client.drain import Drain
from ..queue_client.run import Accepted, Usage, cancel_all
from ..resumable.event_ids import START, Position, ResumableEvents, check_position, parse_event_id
from ..resumable.idempotency import ResumeOptions
from ..resumable.sessions import sampling_of
from ..resumable.stored_embeddings import OPERATION as EMBEDDINGS
from ..resumable.stored_embeddings import StoredEmbeddings
from ..resumable.stored_requests import RequestSnapshot, StoredRequests, answer_of
from ..schemas.completions import GenerationBody
from ..streaming.disconnecting_response import Delivery
from ..telemetry.observation import Observation, Observer, RequestInfo
from .embeddings import stored_content
from .generation_response import Exchange, GenerationResponse, queued
from .operations import Call, Operation, measured_as


@dataclass(frozen=True, slots=True)
class ResumableCall:
    """A request that is to outlive its connection, checked and with its prompts encoded.

    `fingerprint` is that of its body; `kind` is the kind of store item that it counts as.
    """

    resume: ResumeOptions
    request_id: str
    operation: Operation
    body: GenerationBody
    fingerprint: bytes
    call: Call
    requests: Sequence[GenerateRequest]
    kind: ItemKind = ItemKind.REQUEST


Accept = Callable[[], Awaitable[Sequence[Accepted]]]


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A stored request and one of its clients. `headers` are those of the response.

    `admits` says whether this client's request was the one that queued it.
    """

    stored: StoredRequest
    model: ServedModel
    observation: Observation
    headers: Mapping[str, str]
    admits: bool


def queue_id_of(request_id: str, shard: int = DEFAULT_SHARD) -> str:
    """Returns a new id in the queue for the request that clients know by `request_id`."""
    return f"{shard}.{request_id}.{secrets.token_hex(4)}"


class ResumableRequests:
    """Requests that outlive their connection. Refused if this gateway has no store for them."""

    def __init__(
        self,
        stored: StoredRequests | None,
        embeddings: StoredEmbeddings | None = None,
        *,
        models: Models,
        observer: Observer,
        delivery: Delivery,
        drain: Drain,
    ) -> None:
        self._known = stored
        self._known_embeddings = embeddings
        self._models = models
        self._observer = observer
        self._delivery = delivery
        self._drain = drain

    @property
    def stored(self) -> StoredRequests:
        """The stored requests. Raises ApiError if this gateway stores none."""
        if self._known is None:
            raise _keeps_none()
        return self._known

    @property
    def embeddings(self) -> StoredEmbeddings:
        """The stored requests for embeddings. Raises ApiError if this gateway stores none."""
        if self._known_embeddings is None:
            raise _keeps_none()
        return self._known_embeddings

    @property
    def available(self) -> bool:
        """Whether this gateway can store requests."""
        return self._known is not None

    def close(self) -> None:
        """Leaves the requests that run here to other gateways."""
        if self._known is not None:
            self._known.close()
        if self._known_embeddings is not None:
            self._known_embeddings.close()

    async def answer(
        self, resumable_call: ResumableCall, observation: Observation, headers: Mapping[str, str]
    ) -> Response:
        """Queues a new request, or joins one that was sent before. Raises the error of a refusal.

        `headers` are those of the response.
        """
        resume, model, had = resumable_call.resume, resumable_call.call.model, START
        if resume.last_event_id is not None:
            had = parse_event_id(resume.last_event_id, resumable_call.request_id)
        fresh = self._fresh(resumable_call)
        stored = await self.stored.keep(fresh, resume, resumable_call.kind)
        admits = stored.name == fresh.name
        if admits:
            stored = fresh  # which has the bytes of its images
        stored_call = StoredCall(stored, model, observation, headers, admits=admits)
        accept: Accept = partial(self.stored.open, stored, model, fresh=admits)
        if resume.last_event_id is not None:
            accept = partial(self.stored.reopen, stored, model)
        if resume.background and not resumable_call.body.stream:
            snapshot = await self._in_background(stored_call, accept)
            response = resumable_call.operation.accepted(snapshot)
            response.headers.update(headers)
            return response
        return await self._response(stored_call, accept, had, stream=resumable_call.body.stream)

    def _fresh(self, resumable_call: ResumableCall) -> StoredRequest:
        requests = self.stored.lasting(resumable_call.requests, resumable_call.resume)
        call = resumable_call.call
        return StoredRequest(
            request_id=resumable_call.request_id,
            operation=resumable_call.operation.name,
            fingerprint=resumable_call.fingerprint,
            created=requests[0].created_ms // 1000,
            expires_ms=requests[0].deadline_ms + requests[0].keep_ms,
            requests=requests,
            stop=tuple(call.sampling.stop),
            include_usage=call.include_usage,
            return_token_ids=call.shows_ids,
            background=resumable_call.resume.background,
            form=call.form.encode(),
        )

    async def _in_background(self, stored_call: StoredCall, accept: Accept) -> RequestSnapshot:
        accepted = await queued(accept(), stored_call.observation, admits=stored_call.admits)
        await cancel_all(accepted)  # the session continues without readers
        snapshot = await self.stored.snapshot(stored_call.stored, stored_call.model)
        stored_call.observation.end(Usage())
        return snapshot

    async def events(
        self, request_id: str, access: ReadAccess, had: Position, headers: Mapping[str, str]
    ) -> Response:
        """Streams the request's events after those that the client has received.

        `headers` are those of the HTTP request.
        """
        stored = await self.stored.find(request_id, access)
        if stored.operation == EMBEDDINGS:
            raise invalid(f"Embeddings have no events; see GET /v1/requests/{request_id}.")
        model = await self._models.find_former(stored.model, stored.queue)
        check_position(had, _choices(stored))
        info = RequestInfo(
            request_id=request_id,
            operation=measured_as(stored.operation),
            model=stored.model,
            sampling=sampling_of(stored),
            stream=True,
            headers=headers,
        )
        answered = {"x-request-id": request_id}
        observation = self._observer.start(info)
        stored_call = StoredCall(stored, model, observation, answered, admits=False)
        with observation.before_response():
            accept = partial(self.stored.reopen, stored, model)
            return await self._response(stored_call, accept, had, stream=True)

    async def snapshot(self, request_id: str, access: ReadAccess) -> RequestSnapshot:
        """Returns the request's state, with its answer once it has ended."""
        return await self._snapshot(await self.stored.find(request_id, access))

    async def cancel(self, request_id: str, access: ReadAccess) -> RequestSnapshot:
        """Ends the request; returns its state after that."""
        stored = await self.stored.find(request_id, access)
        if stored.operation == EMBEDDINGS:
            await self.embeddings.cancel(stored)
        await self.stored.cancel(stored)
        return await self._snapshot(stored)

    async def _snapshot(self, stored: StoredRequest) -> RequestSnapshot:
        if stored.operation != EMBEDDINGS:
            return await self.stored.snapshot(
                stored, await self._models.find_former(stored.model, stored.queue)
            )
        snapshot, vectors = await self.embeddings.snapshot(stored)
        if not vectors:
            return snapshot
        return replace(snapshot, content=await stored_content(stored, vectors))

    async def forget(self, request_id: str, access: ReadAccess) -> None:
        """Removes the request's answer, which is stored elsewhere now."""
        await self.stored.forget(await self.stored.find(request_id, access))

    async def delete(self, request_id: str, access: ReadAccess) -> None:
        """Ends the request and removes it."""
        await self.stored.delete(await self.stored.find(request_id, access))

    async def _response(
        self, stored_call: StoredCall, accept: Accept, had: Position, *, stream: bool
    ) -> GenerationResponse:
        stored = stored_call.stored
        answer = answer_of(stored, stored_call.model)
        exchange = Exchange(
            tokenizer=stored_call.model.tokenizer,
            choices_per_prompt=stored.requests[0].sampling.n,
            answer=answer,
            observation=stored_call.observation,
            stream=stream,
            headers={
                **stored_call.headers,
                "content-location": f"/v1/requests/{stored.request_id}",
            },
            resumable_id=stored.request_id,
            events=_events(stored, answer, had) if stream else None,
            admits=stored_call.admits,
        )
        accepted = await queued(accept(), stored_call.observation, admits=stored_call.admits)
        return GenerationResponse(exchange, accepted, self._delivery, self._drain)


def _keeps_none() -> ApiError:
    return invalid(
        "This server stores no requests. Leave out Idempotency-Key, x-resumable and background."
    )


def _events(stored: StoredRequest, answer: Answer, had: Position) -> ResumableEvents:
    return ResumableEvents(
        stored.request_id,
        _choices(stored),
        had,
        named=answer.named,
        numbered=answer.numbered,
    )


def _choices(stored: StoredRequest) -> int:
    return stored.requests[0].sampling.n * len(stored.requests)
