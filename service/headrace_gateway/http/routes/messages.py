"""/v1/messages and /v1/messages/count_tokens, as Anthropic's clients use them."""

from functools import partial

from fastapi import APIRouter, Request, Response

from ...anthropic.answer import OMITS_THINKING
from ...anthropic.request import (
    Conversation,
    continues_last_message,
    messages_of,
    omits_thinking,
    sampling_of,
    tooling_of,
    variables_of,
)
from ...anthropic.schemas import NOT_IN_MESSAGES, CountTokensRequest, MessagesRequest
from ...generation.operations import Call, Operation
from ...generation.prompts import ChatOptions
from ...models.models import ServedModel
from ...schemas.answers import MessageObject, TokenCount
from ...schemas.chat_messages import Message
from ..services import services_of
from .documents import answer_of, body_of

MESSAGES = Operation(name="messages")

router = APIRouter()


@router.post("/v1/messages", openapi_extra=body_of(MessagesRequest), **answer_of(MessageObject))
async def create_message(request: Request) -> Response:
    """Answers a conversation, whole or as a stream of server-sent events."""
    services = services_of(request)
    body = await services.body(request, MessagesRequest, NOT_IN_MESSAGES)
    model = await services.models.find(body.model)
    messages, options = await services.pipeline.off_loop(request, partial(_prompt, body, model))
    sampling = sampling_of(body, reasons=services.chat_output.reasons(model))
    plan = partial(services.chat_output.plan, model, sampling)
    form, sampling = await services.pipeline.off_loop(request, lambda: plan(tooling_of(body)))
    if omits_thinking(body):
        form = form.with_echo({OMITS_THINKING: True})
    encode = partial(services.pipeline.chat_prompt, model, messages, options)
    call = Call(model=model, sampling=sampling, encode=encode, form=form)
    return await services.pipeline.generate(MESSAGES, request, body, call)


@router.post(
    "/v1/messages/count_tokens", openapi_extra=body_of(CountTokensRequest), **answer_of(TokenCount)
)
async def count_tokens(request: Request, response: Response) -> dict[str, int]:
    """Returns the number of tokens of a conversation's prompt."""
    services = services_of(request)
    body = await services.body(request, CountTokensRequest, NOT_IN_MESSAGES)
    model = await services.models.find(body.model)
    messages, options = await services.pipeline.off_loop(request, partial(_prompt, body, model))

    count, headers = await services.pipeline.count_tokens(request, model, messages, options)
    response.headers.update(headers)
    return {"input_tokens": count}


def _prompt(body: Conversation, model: ServedModel) -> tuple[list[Message], ChatOptions]:
    return messages_of(body), _options(body, model)


def _options(body: Conversation, model: ServedModel) -> ChatOptions:
    return ChatOptions(
        variables=variables_of(body, model),
        tools=tooling_of(body).for_template(),
        add_generation_prompt=not continues_last_message(body),
        continue_final_message=continues_last_message(body),
    )
