"""POST /v1/completions."""

from functools import partial

from fastapi import APIRouter, Request, Response

from headrace_common.sampling.params import SamplingParams

from ...generation.operations import Call, Operation
from ...openai.prompt_echo_options import PromptEchoOptions
from ...schemas.answers import Completion
from ...schemas.completions import CompletionRequest, check_prompt_logprobs, check_stream_options
from ..services import services_of
from .documents import answer_of, body_of

COMPLETION = Operation(name="text_completion")
DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest), **answer_of(Completion))
async def create_completion(request: Request) -> Response:
    """Continues one prompt or several (text or token ids), whole or as server-sent events."""
    services = services_of(request)
    body = await services.body(request, CompletionRequest)
    check_stream_options(body)
    check_prompt_logprobs(body)
    model = await services.models.find(body.model)
    sampling = _sampling(body)
    call = Call(
        model=model,
        sampling=sampling,
        encode=partial(
            services.pipeline.completion_prompts,
            model,
            body.prompt,
            add_special_tokens=body.add_special_tokens,
            max_prompts=services.settings.max_prompts,
        ),
        include_usage=body.include_usage,
        shows_ids=body.return_token_ids,
        prompt_echo=_prompt_echo(body),
    )
    return await services.pipeline.generate(COMPLETION, request, body, call)


def _sampling(body: CompletionRequest) -> SamplingParams:
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and limit == 0:
        limit = 1  # the token is not shown
    echoed = body.logprobs if body.echo else None
    asked = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    return body.sampling(
        max_tokens=limit,
        logprobs=body.logprobs,
        prompt_logprobs=max(asked, default=None),
    )


def _prompt_echo(body: CompletionRequest) -> PromptEchoOptions | None:
    if not body.echo and body.prompt_logprobs is None and not body.counts:
        return None
    only = body.echo and body.max_tokens == 0
    return PromptEchoOptions(
        echo=body.echo, only=only, logprobs=body.prompt_logprobs, counts=body.counts
    )
