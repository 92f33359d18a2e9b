"""POST /v1/embeddings."""

import secrets

from fastapi import APIRouter, Request, Response

from headrace_common.keys import new_request_id
from headrace_common.messages import GenerateRequest
from headrace_common.pooling import PoolingParams
from headrace_common.sampling import SamplingParams

from ..admission import Job
from ..embeddings import EmbeddingExchange, EmbeddingRequest, EmbeddingResponse
from ..errors import too_long
from ..models import ServedModel
from ..observation import RequestInfo
from ..run import Usage
from ..schemas import parse
from ..services import Services, WithServices, client_request_id
from ..tenants import tenancy_of
from .documents import body_of

OPERATION = "embeddings"
# An engine that does not know embeddings makes one token and is found out.
SAMPLING = SamplingParams(max_tokens=1)

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=body_of(EmbeddingRequest))
async def create_embedding(request: Request, services: WithServices) -> Response:
    """One vector for each input (text or token ids)."""
    body = parse(EmbeddingRequest, await request.body())
    model = await services.models.find(body.model)
    headers = dict(request.headers)
    request_id, client_id = new_request_id(), client_request_id(headers)
    info = RequestInfo(
        request_id=request_id,
        client_request_id=client_id,
        operation=OPERATION,
        model=model.name,
        sampling=SAMPLING,
        stream=False,
        headers=headers,
        tenant=None if services.caller is None else services.caller.tenant,
        key_id=None if services.caller is None else services.caller.key.id,
    )
    observation = services.observer.start(info)
    try:
        tenancy = tenancy_of(services.caller, body)
        job = Job(
            request_id=request_id,
            model=model,
            prompts=await _encode(services, model, body),
            sampling=SAMPLING,
            priority=tenancy.priority,
            tenant=tenancy.tenant,
            cache_salt=tenancy.cache_salt,
            trace=observation.trace,
        )
        requests = _requests(job, body, services.admission.lifetime(headers))
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
        headers={"x-request-id": client_id or request_id, **limits},
    )
    return EmbeddingResponse(exchange, services.delivery, services.drain)


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


def _requests(job: Job, body: EmbeddingRequest, lifetime: tuple[int, int]) -> list[GenerateRequest]:
    created_ms, deadline_ms = lifetime
    return [
        GenerateRequest(
            request_id=new_request_id() if index else job.request_id,
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
            pooling=PoolingParams(dimensions=body.dimensions),
        )
        for index, prompt in enumerate(job.prompts)
    ]
