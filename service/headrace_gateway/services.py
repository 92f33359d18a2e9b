"""What routes work with: built once in create_app, handed to each request."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from fastapi import Depends, Request, Response

from headrace_common.api_keys import DEFAULT_TENANT
from headrace_common.errors import BackendUnavailable
from headrace_common.keys import shard_of
from headrace_common.messages import GenerateRequest
from headrace_common.protocol.accounts import Kind

from .admission import Admission, Job
from .answers import AnswerOptions
from .batches.desk import Desk
from .body import HELD_BODY
from .calls import Call, Operation
from .chat_output import ChatOutput
from .constraints import Constraints
from .drain import Drain
from .engines import EngineDirectory
from .errors import REQUEST_NAME, invalid
from .keeping import Asked, Keeping, queue_id_of
from .limits.work import Result, Work
from .messages_api.errors import named_at
from .models import Models
from .observation import Observation, Observer, RequestInfo
from .prompts import PromptEncoder
from .rate_limits import RateLimited, RateLimits
from .responding import Exchange, GenerationResponse
from .run import Usage
from .schemas import UNSUPPORTED, BodyType, GenerationBody, Refused, parse
from .settings import GatewaySettings
from .strict_calls import at_prompt
from .structured_fields import StructuredBody
from .tenants import Caller, Reader, batch_of, caller_of, tenancy_of
from .watched import Delivery
from .wishes import wish_of

# Where a request's state has the size of its body.
BODY_SIZE = "headrace.body_size"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """`caller` and `rate_limits` are None where API keys are off; `models` are the caller's.

    `notice` says what an operator should know though all is well, or None.
    `batch` is the id of the batch for which a request is run, None for a client's own.
    """

    settings: GatewaySettings
    models: Models
    work: Work
    engines: EngineDirectory
    admission: Admission
    observer: Observer
    delivery: Delivery
    drain: Drain
    keeping: Keeping
    liveness: Callable[[], str | None]
    notice: Callable[[], str | None]
    version: str
    chat_output: ChatOutput
    constraints: Constraints
    keys_on: bool = False
    rate_limits: RateLimits | None = None
    caller: Caller | None = None
    kept_files: Desk | None = None
    batch: str | None = None

    def of(self, caller: Caller) -> "Services":
        """The services as this caller may use them."""
        models = self.models.only(caller.key.allows)
        return replace(self, caller=caller, models=models, work=self.work.of(caller.tenant))

    @property
    def prompts(self) -> PromptEncoder:
        return PromptEncoder(self.work)

    @property
    def lenient(self) -> bool:
        """Whether what nobody knows is left out of requests."""
        return not self.settings.strict_requests

    async def body(
        self, request: Request, kind: type[BodyType], refused: Refused = UNSUPPORTED
    ) -> BodyType:
        """The request's body, checked. Raises ApiError."""
        raw = b"".join([chunk async for chunk in request.stream()])  # which keeps no copy
        request.scope["state"][BODY_SIZE] = len(raw)
        read = partial(parse, kind, raw, refused, lenient=self.lenient)
        body = await self.work.run(len(raw), read)
        request.scope["state"][HELD_BODY].drop()
        return body

    async def off_loop(self, request: Request, work: Callable[[], Result]) -> Result:
        """Does what takes longer with the request's body: in a thread where that is large."""
        return await self.work.run(request.scope["state"][BODY_SIZE], work)

    @property
    def desk(self) -> Desk:
        """Files and batches. Raises ApiError where this server keeps none."""
        if self.kept_files is None:
            raise invalid("This server keeps no files and runs no batches.", code="no_batches")
        return self.kept_files

    @property
    def tenant(self) -> str:
        return DEFAULT_TENANT if self.caller is None else self.caller.tenant

    @property
    def reader(self) -> Reader:
        """Who reads what is stored."""
        return Reader(self.tenant, self.models.allows)

    async def reserve(
        self, job: Job, requests: Sequence[GenerateRequest], observation: Observation
    ) -> Mapping[str, str]:
        """Counts a request against its key's limits; returns what its answer says of them.

        Raises RateLimited and BackendUnavailable.
        """
        if self.caller is None or self.rate_limits is None:
            return {}
        limits = self.rate_limits
        try:
            grant = await limits.reserve(self.caller, job.sampling, requests)
        except (RateLimited, BackendUnavailable) as error:
            observation.rejected(error)
            raise
        if grant is None:
            return {}
        observation.on_end(lambda well: limits.answered(grant, well=well))
        return grant.headers

    async def charged(
        self, read: Callable[[], Awaitable[tuple[Result, int]]]
    ) -> tuple[Result, Mapping[str, str]]:
        """What `read` makes of the text of a request that generates nothing; it also gives how
        many tokens that has, for the limits of the key. With the answer's headers on these.

        Raises RateLimited and BackendUnavailable.
        """
        grant = None
        if self.caller is not None and self.rate_limits is not None:
            grant = await self.rate_limits.reserve_reading(self.caller)
        if grant is None or self.rate_limits is None:
            return (await read())[0], {}
        try:
            made, tokens = await read()
            grant.used = tokens
        finally:
            self.rate_limits.answered(grant, well=True)
        return made, grant.headers

    async def _check_structure(self, request: Request, body: GenerationBody, call: Call) -> None:
        """Raises ApiError for a constraint that no engine could compile."""
        structured = call.sampling.structured_outputs
        if structured is None:
            return
        field = body.structured_field if isinstance(body, StructuredBody) else None
        if field is None and call.form.calls is not None:
            field = "tools"
        await self.constraints.check(structured, field, self.tenant, request)

    async def generate(
        self, operation: Operation, request: Request, body: GenerationBody, call: Call
    ) -> Response:
        """The response that runs a call. Raises what refuses it before it is queued."""
        headers = dict(request.headers)
        client_id = client_request_id(headers)
        wish = wish_of(headers, stream=body.stream, background=body.background, kept=call.kept)
        request_id = queue_id = await self.admission.ids.new(call.model.queue, self.tenant)
        if wish is not None:
            _check_view(call)
            request_id = await self.keeping.identify(wish, self.tenant)
            queue_id = queue_id_of(request_id, shard_of(queue_id))
        name = request.scope["state"][REQUEST_NAME] = client_id or request_id
        info = RequestInfo(
            request_id=request_id,
            client_request_id=client_id,
            operation=operation.measured_as,
            model=call.model.name,
            sampling=call.sampling,
            stream=body.stream,
            headers=headers,
            tenant=None if self.caller is None else self.caller.tenant,
            key_id=None if self.caller is None else self.caller.key.id,
        )
        observation = self.observer.start(info)
        try:
            await self._check_structure(request, body, call)
            job = await _job(call, body, queue_id, observation.trace, self.caller)
            requests = await self.admission.prepare(job, headers)
            limits = await self.reserve(job, requests, observation)
            answered = {**named_at(request.scope, name), **limits}
            if wish is not None:
                kind = Kind.REQUEST if self.batch is None else Kind.LINE
                asked = Asked(wish, request_id, operation, body, call, requests, kind)
                return await self.keeping.answer(asked, call.model, observation, answered)
        except BaseException as error:
            observation.end(Usage(), getattr(error, "code", None) or "request_invalid")
            raise
        exchange = Exchange(
            accept=partial(self.admission.submit, job, requests),
            tokenizer=job.model.tokenizer,
            choices_per_prompt=job.sampling.n,
            answer=operation.answer(_answer_options(job, call, request_id, requests[0].created_ms)),
            observation=observation,
            stream=body.stream,
            headers=answered,
        )
        return GenerationResponse(exchange, self.delivery, self.drain)


def _check_view(call: Call) -> None:
    """Raises ApiError for what would be lost where another gateway goes on."""
    if call.view is not None:
        field = call.view.field
        message = f"{field} is not for requests that outlive their connection: leave it out."
        raise invalid(message, param=field)


async def _job(
    call: Call,
    body: GenerationBody,
    request_id: str,
    trace: Mapping[str, str],
    caller: Caller | None,
) -> Job:
    tenancy = tenancy_of(caller, body)
    prompts = await call.encode()
    return Job(
        request_id=request_id,
        model=call.model,
        prompts=prompts,
        sampling=at_prompt(call.sampling, call.form, call.model.tokenizer, prompts[0]),
        priority=tenancy.priority,
        tenant=tenancy.tenant,
        cache_salt=tenancy.cache_salt,
        trace=trace,
    )


def _answer_options(job: Job, call: Call, request_id: str, created_ms: int) -> AnswerOptions:
    return AnswerOptions(
        answer_id=request_id,
        model=job.model.name,
        system_fingerprint=job.model.system_fingerprint,
        created=created_ms // 1000,
        tokenizer=job.model.tokenizer,
        choices=job.sampling.n * len(job.prompts),
        choices_per_prompt=job.sampling.n,
        logprobs=job.sampling.logprobs,
        include_usage=call.include_usage,
        prompts=tuple(map(tuple, job.prompts)) if call.shows_ids else None,
        prompt=job.prompts[0],
        form=call.form,
        view=None if call.view is None else replace(call.view, prompts=job.prompts),
    )


def client_request_id(headers: Mapping[str, str]) -> str | None:
    """The caller's own name for the request, to find it in logs; never a key to anything."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else None


async def _services(request: Request) -> Services:  # a plain function would be run in a thread
    services = request.app.state.services
    assert isinstance(services, Services)
    state = request.scope["state"]
    caller, batch = caller_of(state), batch_of(state)
    if batch is not None:
        services = replace(services, batch=batch)
    return services if caller is None else services.of(caller)


WithServices = Annotated[Services, Depends(_services)]
