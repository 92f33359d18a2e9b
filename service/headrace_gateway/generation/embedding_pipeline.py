"""Takes a request for embeddings from its route to the queue: each input is a request there."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from headrace_common.protocol.accounts import Item, ItemKind
from headrace_common.protocol.store import StoredRequest
from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import PoolingParams
from headrace_common.text.late_interaction import LateInteraction
from headrace_common.wire.messages import GenerateRequest

from ..errors import invalid, too_long
from ..limits.tenants import tenancy_of
from ..models.models import ServedModel
from ..resumable.idempotency import RESUMABLE_HEADER, ResumeOptions, fingerprint, resume_options
from ..resumable.stored_embeddings import OPERATION, StoredEmbeddingRequest, bytes_of
from ..schemas.chat_messages import Message
from ..streaming.disconnecting_response import answering, check_client
from ..telemetry.observation import Observation
from .admission import Job, tokenizing_limit
from .embeddings import (
    EmbeddingExchange,
    EmbeddingRequest,
    EmbeddingResponse,
    ResumableEmbeddingExchange,
    ResumableEmbeddingResponse,
    content_of,
    of_tokens,
)
from .pipeline import Pipeline
from .prompts import ChatOptions, Prompt
from .resumable_response import queue_id_of

# An engine that does not know embeddings generates one token instead, by which the gateway
# recognises it.
SAMPLING = SamplingParams(max_tokens=1)
# The most numbers of all vectors of an answer, of models that make one for each token: 16 MiB.
MAX_ANSWER_NUMBERS = 2**22
# After this many inputs, the event loop can work for other requests.
INPUTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall:
    """A checked request. `request_id` is the id that its client knows.

    `max_inputs`: the most inputs that it may have. Without `resume` it ends with its connection.
    """

    pipeline: Pipeline
    body: EmbeddingRequest
    model: ServedModel
    max_inputs: int
    resume: ResumeOptions | None
    request_id: str
    observation: Observation
    headers: Mapping[str, str]


async def embed(
    pipeline: Pipeline,
    request: Request,
    body: EmbeddingRequest,
    model: ServedModel,
    max_inputs: int,
) -> Response:
    """Queues a request's first input and returns the response. Raises an error if it is refused."""
    if model.scores_pairs:
        raise invalid(
            f"{model.name} makes scores, not embeddings: use /v1/rerank or /v1/score.",
            param="model",
        )
    headers = request.headers
    resume = _resume_options(headers)
    if resume is None:
        request_id = await pipeline.admission.ids.new(model.queue, pipeline.tenant)
    else:
        request_id = await pipeline.resumable.stored.identify(resume, pipeline.tenant)
    observation = pipeline.observe(request, request_id, OPERATION, model, SAMPLING)
    call = EmbeddingCall(
        pipeline=pipeline,
        body=body,
        model=model,
        max_inputs=max_inputs,
        resume=resume,
        request_id=request_id,
        observation=observation,
        headers={"x-request-id": observation.request_name},
    )
    with observation.before_response():
        lifetime = pipeline.admission.lifetime(request)
        async with pipeline.admission.time_to_queue(lifetime), tokenizing_limit(request):
            job = await _job(call)
            requests = await _requests(call, job, lifetime)
        if resume is None:
            check_client(request.scope["state"])
            response = await _response(call, job, requests)
        else:
            lasting = pipeline.resumable.stored.lasting(requests, resume)
            digest = await pipeline.off_loop(request, partial(fingerprint, OPERATION, body))
            response = await _resumable_response(call, job, lasting, digest)
    return answering(request.scope["state"], response)


def _resume_options(headers: Mapping[str, str]) -> ResumeOptions | None:
    resume = resume_options(headers, stream=False, background=False)
    if resume is not None and resume.key is None:
        raise invalid(
            f"{RESUMABLE_HEADER}: embeddings have no stream to resume. Send an Idempotency-Key, "
            "and the request again.",
            param=RESUMABLE_HEADER,
        )
    return resume


async def _response(call: EmbeddingCall, job: Job, requests: Sequence[GenerateRequest]) -> Response:
    pipeline = call.pipeline
    limits = await pipeline.reserve(job, requests, call.observation)
    model, form = job.model.name, _form(call)

    async def write(vectors: Sequence[bytes], tokens: int) -> bytes:
        counts = [len(request.prompt_token_ids) for request in requests]
        return await content_of(vectors, counts, model, form)

    exchange = EmbeddingExchange(
        admission=pipeline.admission,
        job=job,
        requests=requests,
        write=write,
        observation=call.observation,
        headers={**call.headers, **limits},
    )
    response = EmbeddingResponse(exchange, pipeline.delivery, pipeline.drain)
    await response.begin()
    return response


async def _resumable_response(
    call: EmbeddingCall, job: Job, requests: Sequence[GenerateRequest], digest: bytes
) -> Response:
    pipeline = call.pipeline
    embeddings, fresh = pipeline.resumable.embeddings, _fresh(call, requests, digest)
    kind = ItemKind.EMBEDDINGS if pipeline.batch is None else ItemKind.LINE
    late = job.model.late_interaction
    size = bytes_of(requests, job.model.embedding_size, None if late is None else late.size)
    inputs = await embeddings.keep(fresh, Item(kind, fresh.request_id, size, fresh.expires_ms))
    try:
        limits = await pipeline.reserve(job, inputs.to_run or requests, call.observation)
    except BaseException:
        await embeddings.forget(inputs)
        raise
    exchange = ResumableEmbeddingExchange(
        session=embeddings.open(
            inputs,
            lambda: call.observation.admitted(1, low_priority=job.tenancy.priority > 0),
        ),
        observation=call.observation,
        headers={**call.headers, **limits, **_location(inputs)},
        admits=inputs.fresh,
    )
    response = ResumableEmbeddingResponse(exchange, pipeline.delivery, pipeline.drain)
    await response.begin()
    return response


async def _job(call: EmbeddingCall) -> Job:
    # a refusal here comes before the prompts are read
    tenancy = tenancy_of(call.pipeline.caller, call.body)
    prompts = await _encode(call)
    return Job(
        request_id=call.request_id,
        model=call.model,
        tenancy=tenancy,
        prompts=[each.token_ids for each in prompts],
        images=prompts[0].images,
        sampling=SAMPLING,
        trace=call.observation.trace,
        pooling=PoolingParams(dimensions=call.body.dimensions),
    )


async def _encode(call: EmbeddingCall) -> Sequence[Prompt]:
    """Returns the prompt of each input; that of messages, which are one input, may have images."""
    body = call.body
    if (body.input is None) == (body.messages is None):
        raise invalid("Give either input or messages.", param="input")
    context = await call.pipeline.admission.context(call.model)
    if body.messages is None:
        name, prompts = "input", await _inputs(call, context)
    else:
        name, prompts = "messages", [await _chat(call, body.messages, context)]
    longest = max(map(len, prompts))
    if context is not None and longest > context:
        raise too_long(context, f"{longest} tokens in one input", param=name)
    if call.model.late_interaction is not None:
        _check_vectors(call.model.late_interaction, sum(map(len, prompts)), name)
    return prompts


def _check_vectors(late: LateInteraction, tokens: int, name: str) -> None:
    most = MAX_ANSWER_NUMBERS // late.size
    if tokens > most:
        raise invalid(
            f"{name}: {tokens} tokens have {tokens} vectors, which is over the limit of {most} of "
            "one request. Split the request.",
            param=name,
        )


async def _inputs(call: EmbeddingCall, context: int | None) -> list[Prompt]:
    late, given = call.model.late_interaction, call.body.input
    found = await call.pipeline.prompts.completion(
        call.model,
        given if late is None else _queries(late, given),
        add_special_tokens=late is None and call.body.add_special_tokens is not False,
        max_prompts=call.max_inputs,
        context=context,
        name="input",
    )
    return [Prompt(each) for each in found]


def _queries(late: LateInteraction, given: object) -> object:
    """The inputs of a model of late interaction: texts become queries."""
    if isinstance(given, str):
        return late.query(given)
    if isinstance(given, list):
        return [late.query(each) if isinstance(each, str) else each for each in given]
    return given


async def _chat(call: EmbeddingCall, messages: Sequence[Message], context: int | None) -> Prompt:
    body = call.body
    if call.model.embeds_alone:
        special = body.add_special_tokens is not False
        return await call.pipeline.prompts.alone(
            call.model, messages, add_special_tokens=special, context=context
        )
    options = ChatOptions(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens is True,
        variables=body.chat_template_kwargs,
    )
    return await call.pipeline.prompts.chat(call.model, messages, options, context)


async def _requests(
    call: EmbeddingCall, job: Job, lifetime: tuple[int, int]
) -> list[GenerateRequest]:
    requests: list[GenerateRequest] = []
    for index, prompt in enumerate(job.prompts):
        if index % INPUTS_AT_ONCE == INPUTS_AT_ONCE - 1:
            await asyncio.sleep(0)
        sampling = replace(SAMPLING, seed=secrets.randbits(63))
        requests.append(job.request(await _queue_id(call, job, index), prompt, sampling, lifetime))
    return requests


async def _queue_id(call: EmbeddingCall, job: Job, index: int) -> str:
    ids, tenant = call.pipeline.admission.ids, job.tenancy.tenant
    if call.resume is not None:
        shard = await ids.shard(job.model.queue, tenant)
        return f"{queue_id_of(call.request_id, shard)}.{index}"
    return await ids.new(job.model.queue, tenant) if index else job.request_id


def _fresh(
    call: EmbeddingCall, requests: Sequence[GenerateRequest], digest: bytes
) -> StoredRequest:
    return StoredRequest(
        request_id=call.request_id,
        operation=OPERATION,
        fingerprint=digest,
        created=requests[0].created_ms // 1000,
        expires_ms=requests[0].deadline_ms + requests[0].keep_ms,
        requests=tuple(requests),
        form=_form(call),
    )


def _form(call: EmbeddingCall) -> str:
    encoding = call.body.encoding_format
    return encoding if call.model.late_interaction is None else of_tokens(encoding)


def _location(inputs: StoredEmbeddingRequest) -> Mapping[str, str]:
    return {"content-location": f"/v1/requests/{inputs.stored.request_id}"}
