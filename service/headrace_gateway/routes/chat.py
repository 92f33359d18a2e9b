"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from headrace_common.sampling import SamplingParams

from ..answers import ChatAnswer
from ..errors import invalid
from ..prompts import ChatOptions
from ..schemas import ChatRequest, check_stream_options, parse
from ..services import Call, Operation, WithServices
from .documents import body_of

CHAT = Operation(name="chat", answer=ChatAnswer)

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
async def create_chat_completion(request: Request, services: WithServices) -> Response:
    """Answers a conversation, whole or as a stream of server-sent events."""
    body = parse(ChatRequest, await request.body())
    check_stream_options(body)
    model = await services.models.find(body.model)
    sampling = _sampling(body)
    options = ChatOptions(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        variables=body.chat_template_kwargs,
    )

    async def encode() -> list[list[int]]:
        context = await services.admission.context(model)
        return [await services.prompts.chat(model, body.messages, options, context)]

    call = Call(model=model, sampling=sampling, encode=encode)
    return await services.generate(CHAT, request, body, call)


def _sampling(body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true.", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid("Give max_completion_tokens or max_tokens, not both.", param="max_tokens")
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.sampling(max_tokens=limit, logprobs=logprobs)
