"""From a checked body to accepted requests: deadline, length and token ids, then the queue.

What cannot run on any engine is refused here, before it costs anything.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace_common.api_keys import DEFAULT_TENANT
from headrace_common.bad_words import with_spelled_bad_words
from headrace_common.errors import BackendUnavailable
from headrace_common.messages import GenerateRequest
from headrace_common.sampling import MAX_PROMPT_LOGPROB_ENTRIES, SamplingParams

from .deadlines import seconds_left
from .engines import EngineDirectory
from .errors import invalid, too_long
from .models import ServedModel
from .ports import Client, Generation
from .request_ids import RequestIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds of life of a request, and how much one HTTP request may ask for."""

    default_deadline: float
    max_deadline: float
    max_choices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request's prompts with what they share. `sampling` still has its stop strings.

    `request_id` is the first prompt's; the others get their own. `cache_salt` parts prefix caches.
    """

    request_id: str
    model: ServedModel
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    priority: int = 0
    tenant: str = DEFAULT_TENANT
    cache_salt: bytes = b""
    trace: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that is in the queue, with the sampling parameters its reader needs."""

    request: GenerateRequest
    sampling: SamplingParams
    generation: Generation


class Admission:
    """Raises ApiError for what is refused, QueueFull and BackendUnavailable as the client does.

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

    async def prepare(self, job: Job, headers: Mapping[str, str]) -> list[GenerateRequest]:
        """Requests that would be accepted, one a prompt; nothing is queued yet."""
        choices = job.sampling.branches * len(job.prompts)
        if choices > self._limits.max_choices:
            raise invalid(
                f"n: {choices} choices are over the limit of {self._limits.max_choices} a request.",
                param="n",
            )
        sampling = with_spelled_bad_words(job.sampling, job.model.tokenizer)
        sampling.check_vocabulary(job.model.tokenizer.model_vocab_size)
        _check_prompt_logprobs(sampling, job.prompts)
        context = await self.context(job.model)
        created_ms, deadline_ms = self.lifetime(headers)
        further = [await self.ids.new(job.model.queue, job.tenant) for _ in job.prompts[1:]]
        return [
            GenerateRequest(
                request_id=request_id,
                model=job.model.queue,
                lora=job.model.lora,
                prompt_token_ids=tuple(prompt),
                sampling=_for_engine(sampling, len(prompt), context),
                created_ms=created_ms,
                deadline_ms=deadline_ms,
                tenant=job.tenant,
                cache_salt=job.cache_salt,
                priority=job.priority,
                trace=job.trace or {},
            )
            for request_id, prompt in zip((job.request_id, *further), job.prompts, strict=True)
        ]

    def lifetime(self, headers: Mapping[str, str]) -> tuple[int, int]:
        """When a request with these headers begins and must have ended, in Unix ms of Redis."""
        now = self.clock()
        seconds = seconds_left(
            headers,
            now=now,
            default=self._limits.default_deadline,
            longest=self._limits.max_deadline,
        )
        return int(now * 1000), int(now * 1000) + int(seconds * 1000)

    async def submit(self, job: Job, requests: Sequence[GenerateRequest]) -> list[Accepted]:
        """Queues all of them or, where one is refused, none."""
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
        """The longest prompt plus output in tokens; None where nobody knows yet."""
        running = await self._engines.max_model_len(model.queue)
        return _shortest(model.max_model_len, running or model.usual_model_len)

    async def known_context(self, model: ServedModel) -> int | None:
        """As `context`, but without the queue what the model's files and entry say."""
        try:
            return await self.context(model)
        except BackendUnavailable:
            return _shortest(model.max_model_len, model.usual_model_len)


def _shortest(*lengths: int | None) -> int | None:
    return min((length for length in lengths if length is not None), default=None)


async def cancel_all(accepted: Sequence[Accepted]) -> None:
    """Cancels requests, to the end even where the caller is being cancelled."""
    if accepted:
        await asyncio.shield(asyncio.gather(*(each.generation.cancel() for each in accepted)))


def _for_engine(params: SamplingParams, prompt_tokens: int, context: int | None) -> SamplingParams:
    """Stop strings are the gateway's; the seed is fixed now, so that a moved request keeps it."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    max_tokens = params.max_tokens
    if context is not None:
        _check_length(prompt_tokens, max_tokens, context)
        max_tokens = max_tokens or context - prompt_tokens
    return replace(
        params,
        seed=seed,
        stop=(),
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
