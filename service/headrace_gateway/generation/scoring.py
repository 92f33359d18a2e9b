"""Scores pairs of texts: a cross-encoder reads each pair; vectors of embedding models are compared.

Each pair, or each text that is embedded, is a request of its own in the model's queue.
"""

import asyncio
import json
import secrets
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from operator import mul
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt
from starlette.requests import Request
from starlette.responses import Response

from headrace_common.sampling.pooling import PoolingParams

from ..errors import invalid, too_long
from ..limits.fields import Items, Name, Text
from ..limits.tenants import tenancy_of
from ..models.models import ServedModel
from ..resumable.idempotency import KEY_HEADER, resume_options
from ..schemas.chat_messages import Body
from ..schemas.completions import MAX_CACHE_SALT_CHARS
from ..streaming.disconnecting_response import answering, check_client
from .admission import Job, tokenizing_limit
from .embedding_pipeline import INPUTS_AT_ONCE, SAMPLING
from .embeddings import EmbeddingExchange, EmbeddingResponse
from .pipeline import Pipeline

OPERATION = "score"
# The maximal length of a list, whatever the setting max_embedding_inputs permits.
MAX_TEXTS = 65_536
Pair = tuple[int, int]
Answer = Callable[[Sequence[float], int], Mapping[str, Any]]


class ScoringBody(Body):
    """The fields that all requests for scores share."""

    model: Name | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    priority: StrictInt = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: Text | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)


class ScoreRequest(ScoringBody):
    """vLLM's fields. One text is compared with each of the other list, or two lists in pairs."""

    text_1: Text | Annotated[Items[Text], Field(max_length=MAX_TEXTS)]
    text_2: Text | Annotated[Items[Text], Field(max_length=MAX_TEXTS)]


class RerankDocument(Body):
    text: Text


class RerankRequest(ScoringBody):
    """The fields of Jina and Cohere. `top_n` None or 0: all documents."""

    query: Text
    documents: Items[Text | RerankDocument] = Field(max_length=MAX_TEXTS)
    top_n: StrictInt | None = Field(None, ge=0)
    return_documents: StrictBool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The texts of a request and the pairs to score. `field` names the texts in errors."""

    texts: Sequence[str]
    pairs: Sequence[Pair]
    field: str


def comparison_of(body: ScoreRequest | RerankRequest, most: int) -> Comparison:
    """Returns what a body compares. Raises ApiError for numbers of texts that do not fit."""
    if isinstance(body, RerankRequest):
        field, first = "documents", [body.query]
        second = [each if isinstance(each, str) else each.text for each in body.documents]
    else:
        field, first, second = "text_2", _listed(body.text_1), _listed(body.text_2)
    if not first or not second:
        empty = "text_1" if not first else field
        raise invalid(f"{empty}: give at least one text.", param=empty)
    if len(first) not in (1, len(second)):
        raise invalid(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: give one text_1, or as many.",
            param="text_1",
        )
    if len(second) > most:
        raise invalid(f"{field}: {len(second)} texts are over the limit of {most}.", param=field)
    pairs = [(number % len(first), len(first) + number) for number in range(len(second))]
    return Comparison(texts=[*first, *second], pairs=pairs, field=field)


def _listed(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def score_answer(request_id: str, model: str) -> Answer:
    """Returns the function that makes the body of /v1/score from scores."""

    def answer(scores: Sequence[float], tokens: int) -> Mapping[str, Any]:
        return {
            "id": request_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scores)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    return answer


def rerank_answer(request_id: str, model: str, body: RerankRequest) -> Answer:
    """Returns the function that makes the body of /v1/rerank, with the best documents first."""

    def answer(scores: Sequence[float], tokens: int) -> Mapping[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        best = order[: body.top_n or None]
        return {
            "id": request_id,
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": [_result(body, index, scores[index]) for index in best],
        }

    return answer


def _result(body: RerankRequest, index: int, score: float) -> Mapping[str, Any]:
    result: dict[str, Any] = {"index": index, "relevance_score": score}
    if body.return_documents:
        document = body.documents[index]
        result["document"] = {"text": document if isinstance(document, str) else document.text}
    return result


async def score(
    pipeline: Pipeline,
    request: Request,
    body: ScoreRequest | RerankRequest,
    model: ServedModel,
    max_pairs: int,
) -> Response:
    """Queues a request's first input and returns the response. Raises the error of a refusal."""
    if resume_options(request.headers, stream=False, background=False) is not None:
        raise invalid(
            f"{KEY_HEADER}: scores are not stored; send the request again without it.",
            param=KEY_HEADER,
        )
    if model.late_interaction is not None:
        raise invalid(
            f"{model.name} makes a vector for each token, which is not compared here: get the "
            "vectors from /v1/embeddings.",
            param="model",
        )
    comparison = comparison_of(body, max_pairs)
    request_id = await pipeline.admission.ids.new(model.queue, pipeline.tenant)
    observation = pipeline.observe(request, request_id, OPERATION, model, SAMPLING)
    if isinstance(body, RerankRequest):
        answer = rerank_answer(observation.request_name, model.name, body)
    else:
        answer = score_answer(observation.request_name, model.name)
    with observation.before_response():
        lifetime = pipeline.admission.lifetime(request)
        async with pipeline.admission.time_to_queue(lifetime), tokenizing_limit(request):
            job = Job(
                request_id=request_id,
                model=model,
                # a refusal here comes before the texts are read
                tenancy=tenancy_of(pipeline.caller, body),
                prompts=await _encode(pipeline, model, comparison),
                sampling=SAMPLING,
                trace=observation.trace,
                pooling=PoolingParams(),
            )
            requests = []
            for index, prompt in enumerate(job.prompts):
                if index % INPUTS_AT_ONCE == INPUTS_AT_ONCE - 1:
                    await asyncio.sleep(0)
                ids, tenant = pipeline.admission.ids, job.tenancy.tenant
                new = await ids.new(model.queue, tenant) if index else request_id
                sampling = replace(SAMPLING, seed=secrets.randbits(63))
                requests.append(job.request(new, prompt, sampling, lifetime))
        check_client(request.scope["state"])
        limits = await pipeline.reserve(job, requests, observation)

        async def write(vectors: Sequence[bytes], tokens: int) -> bytes:
            return await asyncio.to_thread(_written, model, comparison, vectors, tokens, answer)

        exchange = EmbeddingExchange(
            admission=pipeline.admission,
            job=job,
            requests=requests,
            write=write,
            observation=observation,
            headers={"x-request-id": observation.request_name, **limits},
        )
        response = EmbeddingResponse(exchange, pipeline.delivery, pipeline.drain)
        await response.begin()
    return answering(request.scope["state"], response)


async def _encode(
    pipeline: Pipeline, model: ServedModel, comparison: Comparison
) -> list[list[int]]:
    """Returns the token ids of each pair, or of each text for a model that embeds."""
    context = await pipeline.admission.context(model)
    field = comparison.field
    if model.scores_pairs:
        texts = comparison.texts
        pairs = [(texts[first], texts[second]) for first, second in comparison.pairs]
        prompts = await pipeline.prompts.pairs(model, pairs, context=context, name=field)
    else:
        prompts = await pipeline.prompts.completion(
            model,
            list(comparison.texts),
            add_special_tokens=True,
            max_prompts=len(comparison.texts),
            context=context,
            name=field,
        )
    most = max(map(len, prompts))
    if context is not None and most > context:
        raise too_long(context, f"{most} tokens in one input", param=field)
    return prompts


def _written(
    model: ServedModel,
    comparison: Comparison,
    vectors: Sequence[bytes],
    tokens: int,
    answer: Answer,
) -> bytes:
    numbers = [struct.unpack(f"<{len(vector) // 4}f", vector) for vector in vectors]
    if model.scores_pairs:
        scores = [each[0] for each in numbers]
    else:
        scores = [_cosine(numbers[first], numbers[second]) for first, second in comparison.pairs]
    return json.dumps(answer(scores, tokens), ensure_ascii=False, separators=(",", ":")).encode()


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = hypot(*one) * hypot(*other)
    return sum(map(mul, one, other)) / lengths if lengths else 0.0
