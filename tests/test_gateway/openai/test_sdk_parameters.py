"""Every parameter of the SDKs' requests is supported, or refused by name with a remedy.

Parameters, and the kinds of messages' parts, tools, formats and choices, are read from the SDKs'
types. So a new version of an SDK with new ones fails here.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import batch_create_params, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_user_message_param import ChatCompletionUserMessageParam
from openai.types.responses import response_create_params
from pydantic import BaseModel

from headrace_gateway.anthropic.schemas import NOT_IN_MESSAGES, CountTokensRequest, MessagesRequest
from headrace_gateway.batches.batch_service import CreateBatch
from headrace_gateway.errors import ApiError
from headrace_gateway.generation.embeddings import EmbeddingRequest
from headrace_gateway.openai.responses.items import read_input
from headrace_gateway.openai.responses.schemas import NOT_IN_RESPONSES, ResponsesRequest
from headrace_gateway.openai.transcript import Transcript
from headrace_gateway.schemas.completions import UNSUPPORTED, ChatRequest, CompletionRequest, parse

Refused = Mapping[str, tuple[tuple[Any, ...], str]]


@dataclass(frozen=True)
class Api:
    """The SDK's type of a request, and how this server reads it.

    `headers`: parameters that the SDK does not put into the body.
    """

    params: Any
    body: type[BaseModel]
    refused: Refused = field(default_factory=lambda: UNSUPPORTED)
    headers: frozenset[str] = frozenset()

    @property
    def names(self) -> set[str]:
        return set(self.params.__annotations__) - self.headers


APIS = {
    "chat": Api(chat_params.CompletionCreateParamsBase, ChatRequest),
    "completions": Api(completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    "embeddings": Api(embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    "responses": Api(
        response_create_params.ResponseCreateParamsBase, ResponsesRequest, NOT_IN_RESPONSES
    ),
    "messages": Api(
        message_create_params.MessageCreateParamsBase, MessagesRequest, NOT_IN_MESSAGES
    ),
    "beta messages": Api(
        beta_params.MessageCreateParamsBase, MessagesRequest, NOT_IN_MESSAGES, frozenset({"betas"})
    ),
    "count_tokens": Api(
        message_count_tokens_params.MessageCountTokensParams, CountTokensRequest, NOT_IN_MESSAGES
    ),
    "batches": Api(batch_create_params.BatchCreateParams, CreateBatch, {}),
}
# The parameters that vLLM's documentation lists besides those of OpenAI.
VLLM = """
    use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids ignore_eos
    include_stop_str_in_output min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens allowed_token_ids prompt_logprobs bad_words echo add_special_tokens
    response_format structured_outputs guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern priority request_id logits_processors
    return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs best_of
    repetition_detection
""".split()
VLLM_CHAT = """
    add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    mm_processor_kwargs media_io_kwargs include_reasoning thinking_token_budget
""".split()


def refusal(body: type[BaseModel], refused: Refused, fields: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body, json.dumps(fields).encode(), refused)
    return caught.value


@pytest.mark.parametrize("api", APIS.values(), ids=APIS.keys())
def test_every_parameter_of_the_sdk_is_known(api: Api) -> None:
    assert api.names - api.body.model_fields.keys() - api.refused.keys() == set()


@pytest.mark.parametrize("api", APIS.values(), ids=APIS.keys())
def test_parameters_that_are_not_served_are_refused_by_name(api: Api) -> None:
    for name in api.names - api.body.model_fields.keys():
        error = refusal(api.body, api.refused, {name: {"some": "value"}})

        assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
        assert error.message == f"{name} is not supported: {api.refused[name][1]}."


def test_vllms_parameters_are_known() -> None:
    known = ChatRequest.model_fields.keys() | UNSUPPORTED.keys()
    assert {*VLLM, *VLLM_CHAT} <= known
    assert {*VLLM, "prompt_embeds"} <= CompletionRequest.model_fields.keys() | UNSUPPORTED.keys()


def kinds(annotation: Any) -> Iterator[str]:
    """The values of `type` that objects at this place of an SDK's request can have."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _literals(annotation.model_fields["type"].annotation)
    elif "type" in getattr(annotation, "__annotations__", {}):
        yield from _literals(get_type_hints(annotation)["type"])
    else:
        for argument in get_args(annotation):
            yield from kinds(argument)


def _literals(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    for argument in get_args(annotation):
        if not isinstance(argument, str):
            yield from _literals(argument)


@dataclass(frozen=True)
class Place:
    """A field whose objects have several kinds. `served` are the kinds that this server
    supports."""

    api: str
    annotation: Any
    served: str
    put: Callable[[dict[str, Any]], dict[str, Any]]


def _in_a_message(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}


CHAT: dict[str, Any] = _in_a_message({"type": "text", "text": "x"})


def _hint(api: str, name: str) -> Any:
    return get_type_hints(APIS[api].params)[name]


def _content(message: Any) -> Any:
    return get_type_hints(message)["content"]


PLACES = {
    "parts of chats": Place(
        "chat", _content(ChatCompletionUserMessageParam), "text image_url file", _in_a_message
    ),
    "tools of chats": Place(
        "chat", _hint("chat", "tools"), "function", lambda tool: {**CHAT, "tools": [tool]}
    ),
    "formats of chats": Place(
        "chat",
        _hint("chat", "response_format"),
        "text json_object json_schema",
        lambda form: {**CHAT, "response_format": form},
    ),
    "choices of chats": Place(
        "chat",
        _hint("chat", "tool_choice"),
        "function allowed_tools",
        lambda tool: {**CHAT, "tool_choice": tool},
    ),
    "tools of responses": Place(
        "responses",
        _hint("responses", "tools"),
        "function",
        lambda tool: {"input": "x", "tools": [tool]},
    ),
    "choices of responses": Place(
        "responses",
        _hint("responses", "tool_choice"),
        "function allowed_tools",
        lambda tool: {"input": "x", "tool_choice": tool},
    ),
    "blocks of messages": Place(
        "messages",
        _content(get_args(get_args(_hint("messages", "messages"))[0])[0]),
        "text image thinking tool_use tool_result",
        _in_a_message,
    ),
    "tools of messages": Place(
        "messages",
        _hint("messages", "tools"),
        "custom",
        lambda tool: {**CHAT, "tools": [tool]},
    ),
    "thinking of messages": Place(
        "messages",
        _hint("messages", "thinking"),
        "enabled disabled adaptive",
        lambda thinking: {**CHAT, "thinking": thinking},
    ),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_kinds_that_are_not_served_are_refused_by_name(place: Place) -> None:
    api = APIS[place.api]
    others = set(kinds(place.annotation)) - set(place.served.split())
    # The SDK knows at least one kind that is supported.
    assert set(place.served.split()) & set(kinds(place.annotation))
    for kind in others:
        error = refusal(api.body, api.refused, place.put({"type": kind}))

        assert error.param is not None and error.param.endswith("type"), (kind, error.message)
        assert f"'{kind}' is not supported" in error.message


def test_items_of_responses_that_are_not_served_are_refused_by_name() -> None:
    served = {"message", "function_call", "function_call_output", "reasoning"}
    others = set(kinds(_hint("responses", "input"))) - served
    assert len(others) > 10
    for kind in others:
        with pytest.raises(ApiError) as refused:
            read_input([{"type": kind}], Transcript())

        assert refused.value.param == "input[0].type"
        assert f"'{kind}' is not supported" in refused.value.message
