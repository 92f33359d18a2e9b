"""Answers requests that outlive their connection: new ones, repeated ones, and by their id."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.responses import Response

from headrace_common.keys import DEFAULT_SHARD
from headrace_common.messages import GenerateRequest
from headrace_common.protocol.accounts import Kind
from headrace_common.protocol.store import StoredRequest

from .admission import Accepted, cancel_all
from .answers import Answer
from .calls import Call, Operation, measured_as
from .drain import Drain
from .embeddings import stored_content
from .errors import ApiError, invalid
from .event_ids import START, Position, ResumableEvents, check_position, parse_event_id
from .kept import KeptRequests, View, answer_of
from .kept_embeddings import OPERATION as EMBEDDINGS
from .kept_embeddings import KeptEmbeddings
from .models import Models, ServedModel
from .observation import Observation, Observer, RequestInfo
from .responding import Exchange, GenerationResponse
from .run import Usage
from .schemas import GenerationBody
from .sessions import sampling_of
from .tenants import Reader
from .watched import Delivery
from .wishes import Wish, fingerprint

Accept = Callable[[], Awaitable[Sequence[Accepted]]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is to outlive its connection, checked and with its prompts encoded.

    `kind` is what it counts as in its tenant's store.
    """

    wish: Wish
    request_id: str
    operation: Operation
    body: GenerationBody
    call: Call
    requests: Sequence[GenerateRequest]
    kind: Kind = Kind.REQUEST


@dataclass(frozen=True, slots=True)
class Served:
    """A request that is kept, and a client of it. `headers` are those of the response."""

    stored: StoredRequest
    model: ServedModel
    observation: Observation
    accept: Accept
    headers: Mapping[str, str]


def queue_id_of(request_id: str, shard: int = DEFAULT_SHARD) -> str:
    """A new id in the queue for the request that clients know by this one."""
    return f"{shard}.{request_id}.{secrets.token_hex(4)}"


class Keeping:
    """`kept` None: this gateway has no store, and such requests are refused; as for embeddings."""

    def __init__(
        self,
        kept: KeptRequests | None,
        *,
        embeddings: KeptEmbeddings | None = None,
        models: Models,
        observer: Observer,
        delivery: Delivery,
        drain: Drain,
    ) -> None:
        self._known = kept
        self._known_embeddings = embeddings
        self._models = models
        self._observer = observer
        self._delivery = delivery
        self._drain = drain

    @property
    def _kept(self) -> KeptRequests:
        if self._known is None:
            raise _keeps_none()
        return self._known

    @property
    def embeddings(self) -> KeptEmbeddings:
        if self._known_embeddings is None:
            raise _keeps_none()
        return self._known_embeddings

    @property
    def available(self) -> bool:
        """Whether this gateway can keep requests."""
        return self._known is not None

    def close(self) -> None:
        """Leaves what runs here to other gateways."""
        if self._known is not None:
            self._known.close()
        if self._known_embeddings is not None:
            self._known_embeddings.close()

    async def identify(self, wish: Wish, tenant: str) -> str:
        """The request's id: the same for the same key. Raises ApiError."""
        return await self._kept.identify(wish, tenant)

    def lasting(
        self, requests: Sequence[GenerateRequest], wish: Wish
    ) -> tuple[GenerateRequest, ...]:
        """The queue's requests as they must be to outlive their client."""
        return self._kept.lasting(requests, wish)

    async def answer(
        self, asked: Asked, model: ServedModel, observation: Observation, headers: Mapping[str, str]
    ) -> Response:
        """The response to a new request, or to one that was sent before. Raises what refuses it.

        `headers` are those of the response.
        """
        wish, had = asked.wish, START
        if wish.last_event_id is not None:
            had = parse_event_id(wish.last_event_id, asked.request_id)
        fresh = self._fresh(asked)
        stored = await self._kept.keep(fresh, wish, asked.kind)
        admits = stored.name == fresh.name
        accept: Accept = partial(self._kept.open, stored, model, fresh=admits)
        if wish.last_event_id is not None:
            accept = partial(self._kept.reopen, stored, model)
        served = Served(stored, model, observation, accept, headers)
        if wish.background and not asked.body.stream:
            view = await self._in_background(served, admits=admits)
            response = asked.operation.accepted(view)
            response.headers.update(headers)
            return response
        return self._response(served, had, stream=asked.body.stream, admits=admits)

    def _fresh(self, asked: Asked) -> StoredRequest:
        requests = self._kept.lasting(asked.requests, asked.wish)
        call = asked.call
        return StoredRequest(
            request_id=asked.request_id,
            operation=asked.operation.name,
            fingerprint=fingerprint(asked.operation.name, asked.body),
            created=requests[0].created_ms // 1000,
            expires_ms=requests[0].deadline_ms + requests[0].keep_ms,
            requests=requests,
            stop=tuple(call.sampling.stop),
            include_usage=call.include_usage,
            return_token_ids=call.shows_ids,
            background=asked.wish.background,
            form=call.form.encode(),
        )

    async def _in_background(self, served: Served, *, admits: bool) -> View:
        accepted = await served.accept()
        await cancel_all(accepted)  # nobody reads it here
        if admits:
            served.observation.admitted(len(accepted))
        view = await self._kept.view(served.stored, served.model)
        served.observation.end(Usage())
        return view

    async def events(
        self, request_id: str, reader: Reader, had: Position, headers: Mapping[str, str]
    ) -> Response:
        """The request's events behind those that the client has. `headers` are the request's."""
        stored = await self._kept.find(request_id, reader)
        if stored.operation == EMBEDDINGS:
            raise invalid(f"Embeddings have no events; see GET /v1/requests/{request_id}.")
        model = await self._models.find(stored.model)
        check_position(had, _choices(stored))
        info = RequestInfo(
            request_id=request_id,
            client_request_id=None,
            operation=measured_as(stored.operation),
            model=stored.model,
            sampling=sampling_of(stored),
            stream=True,
            headers=headers,
        )
        accept: Accept = partial(self._kept.reopen, stored, model)
        answered = {"x-request-id": request_id}
        served = Served(stored, model, self._observer.start(info), accept, answered)
        return self._response(served, had, stream=True, admits=False)

    async def view(self, request_id: str, reader: Reader) -> View:
        """Where the request is, with its answer once it has ended."""
        return await self._view(await self._kept.find(request_id, reader))

    async def cancel(self, request_id: str, reader: Reader) -> View:
        """Ends the request; says where it is then."""
        stored = await self._kept.find(request_id, reader)
        if stored.operation == EMBEDDINGS:
            await self.embeddings.cancel(stored)
        await self._kept.cancel(stored)
        return await self._view(stored)

    async def _view(self, stored: StoredRequest) -> View:
        if stored.operation != EMBEDDINGS:
            return await self._kept.view(stored, await self._models.find(stored.model))
        view, vectors = await self.embeddings.view(stored)
        if not vectors:
            return view
        return replace(view, content=await stored_content(stored, vectors))

    async def forget(self, request_id: str, reader: Reader) -> None:
        """The request's answer is kept elsewhere now."""
        await self._kept.forget(await self._kept.find(request_id, reader))

    async def delete(self, request_id: str, reader: Reader) -> None:
        """Ends the request and forgets it."""
        await self._kept.delete(await self._kept.find(request_id, reader))

    def _response(
        self, served: Served, had: Position, *, stream: bool, admits: bool
    ) -> GenerationResponse:
        stored = served.stored
        answer = answer_of(stored, served.model)
        exchange = Exchange(
            accept=served.accept,
            tokenizer=served.model.tokenizer,
            choices_per_prompt=stored.requests[0].sampling.n,
            answer=answer,
            observation=served.observation,
            stream=stream,
            headers={**served.headers, "content-location": f"/v1/requests/{stored.request_id}"},
            kept=stored.request_id,
            events=_events(stored, answer, had) if stream else None,
            admits=admits,
        )
        return GenerationResponse(exchange, self._delivery, self._drain)


def _keeps_none() -> ApiError:
    return invalid("This server keeps no requests beyond their connection.")


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
