"""Turns a checked body into accepted requests: deadline, length and token ids, then the queue.

Requests that no engine can run are refused here, before they cost anything.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from starlette.requests import Request

from headrace_common.errors import BackendUnavailable, FailureCode, RequestFailed
from headrace_common.sampling.params import MAX_PROMPT_LOGPROB_ENTRIES, SamplingParams
from headrace_common.sampling.pooling import PoolingParams
from headrace_common.text.bad_words import with_spelled_bad_words
from headrace_common.wire.images import ImageSpan, salted_digest
from headrace_common.wire.messages import GenerateRequest

from ..errors import invalid, too_long
from ..limits.tenants import Tenancy
from ..models.models import ServedModel
from ..queue_client.deadlines import seconds_left
from ..queue_client.engines import EngineDirectory
from ..queue_client.ports import Client
from ..queue_client.request_ids import RequestIds
from ..queue_client.run import Accepted, cancel_all

# Seconds from the arrival of a body until its texts are tokens, where no context bounds their
# length: to count their tokens, or to embed them. The longest body takes about four; several at
# once wait for one another.
TOKENIZING_S = 6.0
# The key of a request's state for when its body had arrived, in seconds of the event loop.
BODY_ARRIVED = "headrace.body_arrived"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Default and longest lifetime of a request in seconds, and the most choices of one HTTP
    request.
    """

    default_deadline: float
    max_deadline: float
    max_choices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The prompts of one HTTP request, with what they share. `sampling` still has its stop strings.

    `request_id` is the first prompt's; the other prompts get their own. `pooling` is set if the
    model makes embeddings of the prompts. `images` are those of a chat's only prompt; their digests
    are the hashes of their content, which the tenant's salt replaces in the request.
    """

    request_id: str
    model: ServedModel
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    tenancy: Tenancy
    trace: Mapping[str, str]
    pooling: PoolingParams | None = None
    images: Sequence[ImageSpan] = ()

    def request(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        lifetime: tuple[int, int],
    ) -> GenerateRequest:
        """Returns the request for one prompt; `lifetime` is its creation time and its deadline."""
        created_ms, deadline_ms = lifetime
        return GenerateRequest(
            request_id=request_id,
            model=self.model.queue,
            lora=self.model.lora,
            lora_version=self.model.lora_version,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            created_ms=created_ms,
            deadline_ms=deadline_ms,
            tenant=self.tenancy.tenant,
            tenant_weight=self.tenancy.tenant_weight,
            cache_salt=self.tenancy.cache_salt,
            priority=self.tenancy.priority,
            trace=self.trace,
            pooling=self.pooling,
            key=self.tenancy.key,
            images=tuple(map(self._salted, self.images)),
        )

    def _salted(self, image: ImageSpan) -> ImageSpan:
        return replace(image, digest=salted_digest(image.digest, self.tenancy.cache_salt))


class Admission:
    """Prepares requests and queues them.

    Raises ApiError for a request that is refused, and QueueFull and BackendUnavailable like the
    client.
    `clock` gives Unix seconds of Redis.
    """

    def __init__(
        self,
        client: Client,
        engines: EngineDirectory,
        limits: Limits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._engines = engines
        self.ids = RequestIds(engines)
        self._limits = limits
        self.clock = clock

    async def prepare(self, job: Job, lifetime: tuple[int, int]) -> list[GenerateRequest]:
        """Returns one request for each prompt, checked. Queues nothing."""
        choices = job.sampling.branches * len(job.prompts)
        if choices > self._limits.max_choices:
            raise invalid(
                f"n: {choices} choices exceed the limit of {self._limits.max_choices} per request.",
                param="n",
            )
        sampling = with_spelled_bad_words(job.sampling, job.model.tokenizer)
        sampling.check_vocabulary(job.model.tokenizer.model_vocab_size)
        _check_prompt_logprobs(sampling, job.prompts)
        context = await self.context(job.model)
        tenant = job.tenancy.tenant
        further = [await self.ids.new(job.model.queue, tenant) for _ in job.prompts[1:]]
        return [
            job.request(request_id, prompt, _for_engine(sampling, len(prompt), context), lifetime)
            for request_id, prompt in zip((job.request_id, *further), job.prompts, strict=True)
        ]

    def lifetime(self, request: Request) -> tuple[int, int]:
        """Returns when a request's body had arrived and when it must end, in Unix ms of Redis."""
        waited = asyncio.get_running_loop().time() - request.scope["state"][BODY_ARRIVED]
        now = self.clock() - waited
        seconds = seconds_left(
            request.headers,
            now=now,
            default=self._limits.default_deadline,
            longest=self._limits.max_deadline,
        )
        return int(now * 1000), int(now * 1000) + int(seconds * 1000)

    def time_to_queue(self, lifetime: tuple[int, int]) -> "TimeLimit":
        """Limits the time until a request of this lifetime is queued, from now on. Raises
        RequestFailed if none is left."""
        _, deadline_ms = lifetime
        seconds = deadline_ms / 1000 - self.clock()
        message = "the deadline passed before the prompt was tokenised"
        if seconds <= 0:  # a limit of a block that never waits would not end it
            raise RequestFailed(FailureCode.DEADLINE, message)
        return TimeLimit(asyncio.get_running_loop().time() + seconds, message)

    async def submit(self, job: Job, requests: Sequence[GenerateRequest]) -> list[Accepted]:
        """Queues all requests, or none if one of them is refused."""
        accepted: list[Accepted] = []
        try:
            for request in requests:
                generation = await self._client.submit(request)
                accepted.append(Accepted(request, job.sampling, generation))
        except BaseException:
            await cancel_all(accepted)
            raise
        return accepted

    async def context(self, model: ServedModel) -> int | None:
        """The most tokens of prompt plus output; None if it is not known yet."""
        running = await self._engines.max_model_len(model.queue)
        return _shortest(model.max_model_len, running or model.usual_model_len)

    async def known_context(self, model: ServedModel) -> int | None:
        """Like `context`, but falls back to the model's files and entry if Redis is unreachable."""
        try:
            return await self.context(model)
        except BackendUnavailable:
            return _shortest(model.max_model_len, model.usual_model_len)


def _shortest(*lengths: int | None) -> int | None:
    return min((length for length in lengths if length is not None), default=None)


def _for_engine(params: SamplingParams, prompt_tokens: int, context: int | None) -> SamplingParams:
    """Returns the parameters for the engine. Raises ApiError if the output cannot fit.

    The gateway finds stop strings, so they are removed. A seed is set, so that another engine can
    continue the request.
    """
    seed = secrets.randbits(63) if params.seed is None else params.seed
    max_tokens = params.max_tokens
    if context is not None:
        _check_length(prompt_tokens, max_tokens, context)
        max_tokens = max_tokens or context - prompt_tokens
    return params.for_engine(
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens or params.min_tokens),
    )


def _check_prompt_logprobs(params: SamplingParams, prompts: Sequence[Sequence[int]]) -> None:
    if params.prompt_logprobs is None:
        return
    longest = max(map(len, prompts))
    entries = longest * (1 + params.prompt_logprobs)
    if entries > MAX_PROMPT_LOGPROB_ENTRIES:
        most = MAX_PROMPT_LOGPROB_ENTRIES // longest - 1
        advice = f"ask for {most}" if most >= 0 else "shorten the prompt"
        raise invalid(
            f"prompt_logprobs: {params.prompt_logprobs} for each of {longest} tokens are too many; "
            f"{advice}.",
            param="prompt_logprobs",
        )


def _check_length(prompt_tokens: int, max_tokens: int | None, context: int) -> None:
    wanted = max_tokens or 1
    if prompt_tokens + wanted > context:
        raise too_long(
            context,
            f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the prompt, {wanted} in the "
            "completion)",
        )


def tokenizing_limit(request: Request) -> "TimeLimit":
    """Limits the time in which a request's texts become tokens, where no context bounds them."""
    message = f"the tokens were not counted within {TOKENIZING_S:g} s; send less at once"
    return TimeLimit(request.scope["state"][BODY_ARRIVED] + TOKENIZING_S, message)


class TimeLimit:
    """Ends its block at a time of the event loop: raises RequestFailed with this message.

    It is a class, since a generator would cost each request several times as much.
    """

    __slots__ = ("_limit", "_message")

    def __init__(self, when: float, message: str) -> None:
        self._limit = asyncio.timeout_at(when)
        self._message = message

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise RequestFailed(FailureCode.DEADLINE, self._message) from late
