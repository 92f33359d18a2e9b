"""Takes a generation from its route to the queue, and returns the response that answers it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from headrace_common.config.api_keys import DEFAULT_TENANT
from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.accounts import ItemKind
from headrace_common.sampling.params import SamplingParams
from headrace_common.wire.keys import shard_of
from headrace_common.wire.messages import GenerateRequest

from ..anthropic.errors import named_at
from ..errors import REQUEST_NAME, invalid
from ..images.intake import ImageIntake
from ..limits.rate_limits import RateLimited, RateLimits
from ..limits.tenants import Caller, tenancy_of
from ..limits.work import Result, Work
from ..models.models import ServedModel
from ..openai.responses.truncation import fitting
from ..parsing.strict_calls import at_prompt
from ..parsing.thinking_budget import limit_thinking
from ..queue_client.drain import Drain
from ..queue_client.request_history import RequestHistory
from ..resumable.answer_factory import make_answer
from ..resumable.idempotency import fingerprint, resume_options
from ..schemas.chat_messages import Message
from ..schemas.completions import GenerationBody
from ..schemas.structured_fields import StructuredBody
from ..streaming.disconnecting_response import Delivery, answering, check_client
from ..telemetry.observation import Observation, Observer, RequestInfo
from .admission import Admission, Job, tokenizing_limit
from .constraints import Constraints
from .generation_response import Exchange, GenerationResponse, queued
from .operations import Call, Operation, measured_as
from .prompts import ChatOptions, Prompt, PromptEncoder
from .rendering import Rendering
from .resumable_response import ResumableCall, ResumableRequests, queue_id_of

# The key of a request's state for the size of its body.
BODY_SIZE = "headrace.body_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Checks a call, counts it against its limits, queues it, and returns its response.

    `caller` and `rate_limits` are None if API keys are off. `batch` is the id of the batch that
    runs the request, None for a client's own. `history` notes by which paths requests came.
    """

    work: Work
    admission: Admission
    observer: Observer
    delivery: Delivery
    drain: Drain
    resumable: ResumableRequests
    constraints: Constraints
    rendering: Rendering
    images: ImageIntake
    rate_limits: RateLimits | None = None
    history: RequestHistory | None = None
    caller: Caller | None = None
    batch: str | None = None

    @property
    def prompts(self) -> PromptEncoder:
        return PromptEncoder(self.work, self.rendering, self.images)

    @property
    def tenant(self) -> str:
        return DEFAULT_TENANT if self.caller is None else self.caller.tenant

    async def off_loop(self, request: Request, work: Callable[[], Result]) -> Result:
        """Runs work that grows with the request's body: in a thread if the body is large."""
        return await self.work.run(request.scope["state"][BODY_SIZE], work)

    async def chat_prompt(
        self,
        model: ServedModel,
        messages: Sequence[Message],
        options: ChatOptions,
        *,
        left_free: int | None = None,
    ) -> list[Prompt]:
        """Returns a conversation's prompt.

        Leaves out first turns that do not fit beside `left_free` further tokens, unless None.
        """
        context = await self.admission.context(model)
        encode = partial(self.prompts.chat, model, options=options, context=context)
        if left_free is None or context is None:
            return [await encode(messages)]
        return [await fitting(messages, encode, context - left_free)]

    async def completion_prompts(
        self, model: ServedModel, prompt: object, *, add_special_tokens: bool, max_prompts: int
    ) -> list[Prompt]:
        """Returns a completion's prompts."""
        found = await self.prompts.completion(
            model,
            prompt,
            add_special_tokens=add_special_tokens,
            max_prompts=max_prompts,
            context=await self.admission.context(model),
        )
        return list(map(Prompt, found))

    def observe(
        self,
        request: Request,
        request_id: str,
        operation: str,
        model: ServedModel,
        sampling: SamplingParams,
        *,
        stream: bool = False,
    ) -> Observation:
        """Begins to observe a request, and notes its name for the headers of an error."""
        info = RequestInfo(
            request_id=request_id,
            operation=measured_as(operation),
            model=model.name,
            sampling=sampling,
            stream=stream,
            headers=request.headers,
            caller=self.caller,
        )
        observation = self.observer.start(info)
        request.scope["state"][REQUEST_NAME] = observation.request_name
        return observation

    async def reserve(
        self, job: Job, requests: Sequence[GenerateRequest], observation: Observation
    ) -> Mapping[str, str]:
        """Counts a request against its key's limits; returns the headers that tell their state.

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
        observation.on_end(lambda success: limits.answered(grant, success=success))
        return grant.headers

    async def charged(
        self, request: Request, read: Callable[[], Awaitable[tuple[Result, int]]]
    ) -> tuple[Result, Mapping[str, str]]:
        """Runs `read` for a request that generates nothing, and counts the tokens that it read.

        `read` returns a result and its tokens; this returns the result and the answer's headers.
        Raises RateLimited, BackendUnavailable, and RequestFailed after some seconds.
        """
        grant = None
        if self.caller is not None and self.rate_limits is not None:
            grant = await self.rate_limits.reserve_tokenizing(self.caller)
        if grant is None or self.rate_limits is None:
            async with tokenizing_limit(request):
                return (await read())[0], {}
        try:
            async with tokenizing_limit(request):
                made, tokens = await read()
            grant.used = tokens
        finally:
            self.rate_limits.answered(grant, success=True)
        return made, grant.headers

    async def count_tokens(
        self,
        request: Request,
        model: ServedModel,
        messages: Sequence[Message],
        options: ChatOptions,
    ) -> tuple[int, Mapping[str, str]]:
        """Returns the tokens of a chat's prompt, and the answer's headers. Raises the errors of
        `charged`."""

        async def read() -> tuple[int, int]:
            prompt = await self.prompts.chat(model, messages, options)
            return len(prompt), len(prompt)

        return await self.charged(request, read)

    async def generate(
        self, operation: Operation, request: Request, body: GenerationBody, call: Call
    ) -> Response:
        """Queues a call and returns the response that answers it. Raises the error of a refusal."""
        headers = request.headers
        resume = resume_options(
            headers, stream=body.stream, background=body.background, stored=call.stored
        )
        request_id = queue_id = await self.admission.ids.new(call.model.queue, self.tenant)
        if resume is not None:
            _check_prompt_echo(call)
            request_id = await self.resumable.stored.identify(resume, self.tenant)
            queue_id = queue_id_of(request_id, shard_of(queue_id))
        observation = self.observe(
            request, request_id, operation.name, call.model, call.sampling, stream=body.stream
        )
        with observation.before_response():
            lifetime = self.admission.lifetime(request)
            # embedding has a time limit of its own
            await self._check_structure(request, body, call)
            async with self.admission.time_to_queue(lifetime):
                job = await _job(call, body, queue_id, observation.trace, self.caller)
                requests = await self.admission.prepare(job, lifetime)
            if resume is None:
                check_client(request.scope["state"])
            limits = await self.reserve(job, requests, observation)
            answered = {**named_at(request.scope, observation.request_name), **limits}
            if resume is not None:
                kind = ItemKind.REQUEST if self.batch is None else ItemKind.LINE
                digest = await self.off_loop(request, partial(fingerprint, operation.name, body))
                resumable_call = ResumableCall(
                    resume, request_id, operation, body, digest, call, requests, kind
                )
                response = await self.resumable.answer(resumable_call, observation, answered)
            else:
                answer = make_answer(
                    operation.name,
                    requests,
                    call.model,
                    answer_id=request_id,
                    include_usage=call.include_usage,
                    shows_ids=call.shows_ids,
                    form=call.form,
                    prompt_echo=call.prompt_echo,
                )
                exchange = Exchange(
                    tokenizer=job.model.tokenizer,
                    choices_per_prompt=job.sampling.n,
                    answer=answer,
                    observation=observation,
                    stream=body.stream,
                    headers=answered,
                )
                accepted = await queued(self.admission.submit(job, requests), observation)
                response = GenerationResponse(exchange, accepted, self.delivery, self.drain)
        if self.history is not None:
            self.history.note_path(request.url.path, requests)
        return answering(request.scope["state"], response)

    async def _check_structure(self, request: Request, body: GenerationBody, call: Call) -> None:
        """Raises ApiError for a constraint that no engine can compile."""
        structured = call.sampling.structured_outputs
        if structured is None:
            return
        field = body.structured_field if isinstance(body, StructuredBody) else None
        if field is None and call.form.calls is not None:
            field = "tools"
        await self.constraints.check(structured, field, self.tenant, request)


def _check_prompt_echo(call: Call) -> None:
    """Raises ApiError for fields whose answer another gateway could not continue."""
    if call.prompt_echo is not None:
        field = call.prompt_echo.field
        message = f"{field} is not for requests that outlive their connection: leave it out."
        raise invalid(message, param=field)


async def _job(
    call: Call,
    body: GenerationBody,
    request_id: str,
    trace: Mapping[str, str],
    caller: Caller | None,
) -> Job:
    tenancy = tenancy_of(caller, body)  # a refusal here comes before the prompts are encoded
    prompts = await call.encode()
    model, prompt = call.model, prompts[0].token_ids
    sampling = at_prompt(call.sampling, call.form, model.tokenizer, prompt, model.chat_template)
    return Job(
        request_id=request_id,
        model=model,
        prompts=[each.token_ids for each in prompts],
        images=prompts[0].images,
        sampling=limit_thinking(sampling, call.form, model.tokenizer, prompt),
        tenancy=tenancy,
        trace=trace,
    )
