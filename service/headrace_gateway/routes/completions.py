"""POST /v1/completions."""

from fastapi import APIRouter, Request, Response

from headrace_common.sampling import SamplingParams

from ..answers import CompletionAnswer
from ..errors import invalid
from ..schemas import CompletionRequest, check_stream_options, parse
from ..services import Call, Operation, WithServices
from .documents import body_of

COMPLETION = Operation(name="text_completion", answer=CompletionAnswer)
DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
async def create_completion(request: Request, services: WithServices) -> Response:
    """Continues a prompt (text or token ids) or several, whole or as server-sent events."""
    body = parse(CompletionRequest, await request.body())
    check_stream_options(body)
    model = await services.models.find(body.model)
    sampling = _sampling(body)

    async def encode() -> list[list[int]]:
        return await services.prompts.completion(
            model,
            body.prompt,
            add_special_tokens=body.add_special_tokens,
            max_prompts=services.settings.max_prompts,
            context=await services.admission.context(model),
        )

    call = Call(model=model, sampling=sampling, encode=encode)
    return await services.generate(COMPLETION, request, body, call)


def _sampling(body: CompletionRequest) -> SamplingParams:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(
            "best_of must equal n: all choices are returned; pick the best yourself.",
            param="best_of",
        )
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return body.sampling(max_tokens=limit, logprobs=body.logprobs)
