"""POST /v1/chat/completions."""

from functools import partial

from fastapi import APIRouter, Request, Response

from headrace_common.sampling.params import SamplingParams

from ...errors import invalid
from ...generation.operations import Call, Operation
from ...generation.prompts import ChatOptions
from ...models.models import ServedModel
from ...openai.prompt_echo_options import PromptEchoOptions
from ...parsing.chat_output import tooling
from ...parsing.output import OutputForm
from ...parsing.template_variables import (
    with_budget,
    with_effort,
    with_verbosity,
    without_thinking,
)
from ...schemas.answers import ChatCompletion
from ...schemas.completions import (
    ChatRequest,
    check_prompt_logprobs,
    check_stream_options,
    thinking_limit,
)
from ..services import Services, services_of
from .documents import answer_of, body_of

CHAT = Operation(name="chat")

router = APIRouter()


@router.post(
    "/v1/chat/completions", openapi_extra=body_of(ChatRequest), **answer_of(ChatCompletion)
)
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, whole or as a stream of server-sent events."""
    services = services_of(request)
    body = await services.body(request, ChatRequest)
    check_stream_options(body)
    check_prompt_logprobs(body)
    model = await services.models.find(body.model)
    form, sampling, options = await services.pipeline.off_loop(
        request, partial(_plan, services, model, body)
    )
    call = Call(
        model=model,
        sampling=sampling,
        encode=partial(services.pipeline.chat_prompt, model, body.messages, options),
        form=form,
        include_usage=body.include_usage,
        shows_ids=body.return_token_ids,
        prompt_echo=_prompt_echo(body),
    )
    return await services.pipeline.generate(CHAT, request, body, call)


def _plan(
    services: Services, model: ServedModel, body: ChatRequest
) -> tuple[OutputForm, SamplingParams, ChatOptions]:
    tools = tooling(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    form, sampling = services.chat_output.plan(model, _sampling(body), tools)
    variables = with_effort(model, body.chat_template_kwargs, body.reasoning_effort)
    variables = with_verbosity(model, variables, body.verbosity)
    variables = with_budget(model, variables, sampling)
    options = ChatOptions(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        variables=without_thinking(model, variables, sampling),
        tools=tools.for_template(),
        video_fps=body.media_io_kwargs.video.fps,
    )
    return form, sampling, options


def _prompt_echo(body: ChatRequest) -> PromptEchoOptions | None:
    if body.prompt_logprobs is None and not body.counts:
        return None
    return PromptEchoOptions(logprobs=body.prompt_logprobs, counts=body.counts)


def _sampling(body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true.", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid("Give max_completion_tokens or max_tokens, not both.", param="max_tokens")
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.sampling(
        max_tokens=limit,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        thinking_token_budget=thinking_limit(body.thinking_token_budget),
    )
