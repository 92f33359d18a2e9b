"""/v1/responses: OpenAI's newer API for chats, which the server can store and run in the
background."""

from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.responses import JSONResponse

from headrace_common.sampling.params import SamplingParams

from ...errors import ApiError, invalid
from ...generation.operations import Call, Operation
from ...generation.prompts import ChatOptions
from ...models.models import ServedModel
from ...openai.responses.answer import ID_PREFIX, failed_object, response_object
from ...openai.responses.items import read_input, read_output
from ...openai.responses.request import echo_of, sampling_of, tooling_of
from ...openai.responses.schemas import NOT_IN_RESPONSES, SEALED_REASONING, ResponsesRequest
from ...openai.transcript import Transcript, text_part
from ...parsing.chat_output import Tooling
from ...parsing.output import OutputForm
from ...parsing.template_variables import (
    with_budget,
    with_effort,
    with_verbosity,
    without_thinking,
)
from ...resumable.event_ids import START, Position, parse_event_id
from ...resumable.stored_requests import RequestSnapshot
from ...schemas.answers import DeletedResponse, InputItems, InputTokens, ResponseObject
from ...schemas.chat_messages import Message
from ...streaming.disconnecting_response import answering
from ..services import Services, services_of
from .documents import answer_of, body_of
from .pages import page

MAX_LISTED = 100

router = APIRouter()


def present(snapshot: RequestSnapshot) -> dict[str, Any]:
    """Returns a stored response in its present state."""
    if snapshot.result is not None:
        return dict(snapshot.result)
    stored = snapshot.stored
    echo = OutputForm.decode(stored.form).echo
    now = response_object(
        echo, stored.request_id, stored.created, stored.model, status=snapshot.status
    )
    if snapshot.error is None or snapshot.status == "cancelled":
        return now
    return failed_object(now, snapshot.error)


RESPONSES = Operation(name="responses", accepted=lambda snapshot: JSONResponse(present(snapshot)))


@router.post("/v1/responses", openapi_extra=body_of(ResponsesRequest), **answer_of(ResponseObject))
async def create_response(request: Request) -> Response:
    """Answers an input: whole, as a stream of typed events, or in the background."""
    services = services_of(request)
    body = await services.body(request, ResponsesRequest, NOT_IN_RESPONSES)
    model = await services.models.find(body.model)
    stored = services.resumable.available if body.store is None else body.store
    if body.background and not stored:
        raise invalid("background needs store: true.", param="background")
    tools = await services.pipeline.off_loop(request, partial(tooling_of, body))
    plan = partial(services.chat_output.plan, model, sampling_of(body), tools)
    form, sampling = await services.pipeline.off_loop(request, plan)
    history, items = await _conversation(body, model, request, services)
    echo: dict[str, Any] = {"response": echo_of(body, sampling, stored=stored)}
    if SEALED_REASONING in (body.include or ()):
        echo["seals_reasoning"] = True
    if stored:
        echo |= {"history": history.plain(), "input": items}
    options = await services.pipeline.off_loop(
        request, partial(_options, body, model, sampling, tools)
    )
    messages = _instructed(body.instructions, history.messages())
    left_free = None if body.truncation == "disabled" else body.max_output_tokens or 1
    call = Call(
        model=model,
        sampling=sampling,
        encode=partial(
            services.pipeline.chat_prompt, model, messages, options, left_free=left_free
        ),
        form=form.with_echo(echo),
        stored=stored,
    )
    return await services.pipeline.generate(RESPONSES, request, body, call)


@router.post(
    "/v1/responses/input_tokens", openapi_extra=body_of(ResponsesRequest), **answer_of(InputTokens)
)
async def count_input_tokens(request: Request, response: Response) -> dict[str, Any]:
    """Returns the number of tokens of such a response's prompt."""
    services = services_of(request)
    body = await services.body(request, ResponsesRequest, NOT_IN_RESPONSES)
    model = await services.models.find(body.model)
    tools = tooling_of(body)
    _, sampling = services.chat_output.plan(model, sampling_of(body), tools)
    history, _ = await _conversation(body, model, request, services)
    messages = _instructed(body.instructions, history.messages())
    options = _options(body, model, sampling, tools)

    count, headers = await services.pipeline.count_tokens(request, model, messages, options)
    response.headers.update(headers)
    return {"object": "response.input_tokens", "input_tokens": count}


@router.get("/v1/responses/{response_id}", **answer_of(ResponseObject))
async def retrieve_response(
    response_id: str,
    request: Request,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response | dict[str, Any]:
    """Returns a stored response in its present state, or streams its events after a given one."""
    services = services_of(request)
    snapshot = await _find(response_id, services)
    if not stream:
        return present(snapshot)
    request_id = snapshot.stored.request_id
    had = START if starting_after is None else Position((starting_after + 1,))
    if last_event_id is not None:
        had = parse_event_id(last_event_id, request_id)
    response = await services.resumable.events(
        request_id, services.read_access, had, request.headers
    )
    return answering(request.scope["state"], response)


@router.post("/v1/responses/{response_id}/cancel", **answer_of(ResponseObject))
async def cancel_response(response_id: str, request: Request) -> dict[str, Any]:
    """Ends a response, whether it waits or runs. One that has ended is not changed."""
    services = services_of(request)
    snapshot = await _find(response_id, services)
    return present(
        await services.resumable.cancel(snapshot.stored.request_id, services.read_access)
    )


@router.delete("/v1/responses/{response_id}", **answer_of(DeletedResponse))
async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
    """Ends a response and removes it."""
    services = services_of(request)
    snapshot = await _find(response_id, services)
    await services.resumable.delete(snapshot.stored.request_id, services.read_access)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items", **answer_of(InputItems))
async def list_input_items(
    response_id: str,
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
    order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
) -> dict[str, Any]:
    """Returns the items of a stored response's own input, last first unless asked otherwise."""
    services = services_of(request)
    snapshot = await _find(response_id, services)
    given = OutputForm.decode(snapshot.stored.form).echo["input"]
    items = [
        {"type": "message", "id": f"item_{snapshot.stored.request_id}_{index}", **item}
        for index, item in enumerate(given)
    ]
    if order == "desc":
        items.reverse()
    return page(items, lambda item: item["id"], dict, after=after, limit=limit)


async def _find(response_id: str, services: Services) -> RequestSnapshot:
    try:
        snapshot = await services.resumable.snapshot(
            response_id.removeprefix(ID_PREFIX), services.read_access
        )
    except ApiError as error:
        raise (_not_found() if error.status == 404 else error) from error
    if not response_id.startswith(ID_PREFIX) or snapshot.stored.operation != RESPONSES.name:
        raise _not_found()
    return snapshot


async def _previous(response_id: str, services: Services) -> RequestSnapshot:
    try:
        return await _find(response_id, services)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        raise invalid(
            f"previous_response_id: there is no response {response_id[:80]!r}, or it is no longer "
            "kept.",
            param="previous_response_id",
            code="previous_response_not_found",
        ) from error


def _not_found() -> ApiError:
    message = "There is no response with this id, or it is no longer stored."
    return ApiError(404, message, code="response_not_found")


async def _conversation(
    body: ResponsesRequest, model: ServedModel, request: Request, services: Services
) -> tuple[Transcript, list[dict[str, Any]]]:
    """Returns all messages, earlier and new ones, and the items of the new ones."""
    transcript = Transcript()
    if body.previous_response_id is not None:
        snapshot = await _previous(body.previous_response_id, services)
        if snapshot.result is None:
            raise invalid(
                f"previous_response_id: that response is {snapshot.status}; wait until it has "
                "completed, or name another one.",
                param="previous_response_id",
            )
        transcript.extend(OutputForm.decode(snapshot.stored.form).echo["history"])
        read_output(snapshot.result["output"], transcript)
    read = partial(
        read_input,
        body.input,
        transcript,
        lenient=services.lenient,
        images=model.images is not None,
    )
    return transcript, await services.pipeline.off_loop(request, read)


def _instructed(instructions: str | None, messages: list[Message]) -> list[Message]:
    """Puts the instructions before the messages: many templates take one system message only."""
    if instructions is None:
        return messages
    first, *others = messages
    if first.role not in ("system", "developer"):
        return [Message(role="system", content=instructions), *messages]
    if isinstance(first.content, list):
        return [
            Message(role=first.role, content=[text_part(instructions), *first.content]),
            *others,
        ]
    return [Message(role=first.role, content=f"{instructions}\n\n{first.content}"), *others]


def _options(
    body: ResponsesRequest, model: ServedModel, sampling: SamplingParams, tools: Tooling
) -> ChatOptions:
    variables = with_budget(model, _variables(body, model), sampling)
    variables = without_thinking(model, variables, sampling)
    return ChatOptions(variables=variables, tools=tools.for_template())


def _variables(body: ResponsesRequest, model: ServedModel) -> Any:
    effort = None if body.reasoning is None else body.reasoning.effort
    variables = with_effort(model, body.chat_template_kwargs, effort, "reasoning.effort")
    return with_verbosity(model, variables, None if body.text is None else body.text.verbosity)
