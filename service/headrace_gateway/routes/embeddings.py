"""POST /v1/embeddings."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from headrace_common.messages import GenerateRequest
from headrace_common.pooling import PoolingParams
from headrace_common.protocol.accounts import Item, Kind
from headrace_common.protocol.store import StoredRequest
from headrace_common.sampling import SamplingParams

from ..admission import Job
from ..embeddings import (
    EmbeddingExchange,
    EmbeddingRequest,
    EmbeddingResponse,
    KeptEmbeddingResponse,
    KeptExchange,
)
from ..errors import REQUEST_NAME, invalid, too_long
from ..keeping import queue_id_of
from ..kept_embeddings import OPERATION, KeptInputs, bytes_of
from ..models import ServedModel
from ..observation import Observation, RequestInfo
from ..run import Usage
from ..services import Services, WithServices, client_request_id
from ..tenants import tenancy_of
from ..wishes import RESUMABLE_HEADER, Wish, fingerprint, wish_of
from .documents import body_of

# An engine that does not know embeddings makes one token and is found out.
SAMPLING = SamplingParams(max_tokens=1)
# After each such number of inputs other requests have a turn.
INPUTS_AT_ONCE = 64

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A checked request. `request_id` is what its client knows it by. `wish` None: it lives as
    long as its connection."""

    services: Services
    body: EmbeddingRequest
    model: ServedModel
    headers: Mapping[str, str]
    wish: Wish | None
    request_id: str
    observation: Observation

    @property
    def answered(self) -> dict[str, str]:
        """The response's headers."""
        return {"x-request-id": client_request_id(self.headers) or self.request_id}


@router.post("/v1/embeddings", openapi_extra=body_of(EmbeddingRequest))
async def create_embedding(request: Request, services: WithServices) -> Response:
    """One vector for each input (text or token ids)."""
    body = await services.body(request, EmbeddingRequest)
    model = await services.models.find(body.model)
    headers = dict(request.headers)
    wish = _wish(headers)
    if wish is None:
        request_id = await services.admission.ids.new(model.queue, services.tenant)
    else:
        request_id = await services.keeping.identify(wish, services.tenant)
    info = RequestInfo(
        request_id=request_id,
        client_request_id=client_request_id(headers),
        operation=OPERATION,
        model=model.name,
        sampling=SAMPLING,
        stream=False,
        headers=headers,
        tenant=None if services.caller is None else services.caller.tenant,
        key_id=None if services.caller is None else services.caller.key.id,
    )
    observation = services.observer.start(info)
    asked = Asked(
        services=services,
        body=body,
        model=model,
        headers=headers,
        wish=wish,
        request_id=request_id,
        observation=observation,
    )
    request.scope["state"][REQUEST_NAME] = asked.answered["x-request-id"]
    try:
        job = await _job(asked)
        requests = await _requests(asked, job)
        if wish is not None:
            return await _kept(asked, job, services.keeping.lasting(requests, wish))
        limits = await services.reserve(job, requests, observation)
    except BaseException as error:
        observation.end(Usage(), getattr(error, "code", None) or "request_invalid")
        raise
    exchange = EmbeddingExchange(
        admission=services.admission,
        job=job,
        requests=requests,
        encoding=body.encoding_format,
        observation=observation,
        headers={**asked.answered, **limits},
    )
    return EmbeddingResponse(exchange, services.delivery, services.drain)


def _wish(headers: Mapping[str, str]) -> Wish | None:
    wish = wish_of(headers, stream=False, background=False)
    if wish is not None and wish.key is None:
        raise invalid(
            f"{RESUMABLE_HEADER}: embeddings have no stream to resume. Send an Idempotency-Key, "
            "and the request again.",
            param=RESUMABLE_HEADER,
        )
    return wish


async def _job(asked: Asked) -> Job:
    tenancy = tenancy_of(asked.services.caller, asked.body)
    return Job(
        request_id=asked.request_id,
        model=asked.model,
        prompts=await _encode(asked.services, asked.model, asked.body),
        sampling=SAMPLING,
        priority=tenancy.priority,
        tenant=tenancy.tenant,
        cache_salt=tenancy.cache_salt,
        trace=asked.observation.trace,
    )


async def _encode(
    services: Services, model: ServedModel, body: EmbeddingRequest
) -> list[list[int]]:
    context = await services.admission.context(model)
    prompts = await services.prompts.completion(
        model,
        body.input,
        add_special_tokens=body.add_special_tokens,
        max_prompts=services.settings.max_embedding_inputs,
        context=context,
        name="input",
    )
    longest = max(map(len, prompts))
    if context is not None and longest > context:
        raise too_long(context, f"{longest} tokens in one input", param="input")
    return prompts


async def _requests(asked: Asked, job: Job) -> list[GenerateRequest]:
    created_ms, deadline_ms = asked.services.admission.lifetime(asked.headers)
    requests: list[GenerateRequest] = []
    for index, prompt in enumerate(job.prompts):
        if index % INPUTS_AT_ONCE == INPUTS_AT_ONCE - 1:
            await asyncio.sleep(0)
        request = GenerateRequest(
            request_id=await _queue_id(asked, job, index),
            model=job.model.queue,
            lora=job.model.lora,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=1, seed=secrets.randbits(63)),
            created_ms=created_ms,
            deadline_ms=deadline_ms,
            tenant=job.tenant,
            cache_salt=job.cache_salt,
            priority=job.priority,
            trace=job.trace or {},
            pooling=PoolingParams(dimensions=asked.body.dimensions),
        )
        requests.append(request)
    return requests


async def _queue_id(asked: Asked, job: Job, index: int) -> str:
    ids = asked.services.admission.ids
    if asked.wish is not None:
        shard = await ids.shard(job.model.queue, job.tenant)
        return f"{queue_id_of(asked.request_id, shard)}.{index}"
    return await ids.new(job.model.queue, job.tenant) if index else job.request_id


async def _kept(asked: Asked, job: Job, requests: Sequence[GenerateRequest]) -> Response:
    services = asked.services
    embeddings, fresh = services.keeping.embeddings, _fresh(asked, requests)
    kind = Kind.EMBEDDINGS if services.batch is None else Kind.LINE
    size = bytes_of(requests, job.model.embedding_size)
    kept = await embeddings.keep(fresh, Item(kind, fresh.request_id, size, fresh.expires_ms))
    try:
        limits = await services.reserve(job, kept.to_run or requests, asked.observation)
    except BaseException:
        await embeddings.forget(kept)
        raise
    exchange = KeptExchange(
        session=embeddings.open(kept, lambda: asked.observation.admitted(1)),
        observation=asked.observation,
        headers={**asked.answered, **limits, **_location(kept)},
        admits=kept.fresh,
    )
    return KeptEmbeddingResponse(exchange, services.delivery, services.drain)


def _fresh(asked: Asked, requests: Sequence[GenerateRequest]) -> StoredRequest:
    return StoredRequest(
        request_id=asked.request_id,
        operation=OPERATION,
        fingerprint=fingerprint(OPERATION, asked.body),
        created=requests[0].created_ms // 1000,
        expires_ms=requests[0].deadline_ms + requests[0].keep_ms,
        requests=tuple(requests),
        form=asked.body.encoding_format,
    )


def _location(kept: KeptInputs) -> Mapping[str, str]:
    return {"content-location": f"/v1/requests/{kept.stored.request_id}"}
