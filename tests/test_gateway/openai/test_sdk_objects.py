"""Every field of the objects within the SDKs' requests is supported, or is listed here as refused.

`test_sdk_parameters` checks the requests' own parameters, this file the objects in them: messages,
their parts, tools, options. Both read the SDKs' types, so a new version of an SDK with a new field,
or a new value of a field, fails here.
"""

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import batch_create_params, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from headrace_gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from headrace_gateway.batches.batch_service import CreateBatch
from headrace_gateway.generation.embeddings import EmbeddingRequest
from headrace_gateway.openai.responses.items import KINDS
from headrace_gateway.openai.responses.schemas import ResponsesRequest
from headrace_gateway.schemas.completions import ChatRequest, CompletionRequest

REQUESTS: dict[str, tuple[Any, type[BaseModel]]] = {
    "chat": (chat_params.CompletionCreateParamsBase, ChatRequest),
    "completions": (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    "embeddings": (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    "responses": (response_create_params.ResponseCreateParamsBase, ResponsesRequest),
    "messages": (message_create_params.MessageCreateParamsBase, MessagesRequest),
    "beta messages": (beta_params.MessageCreateParamsBase, MessagesRequest),
    "count_tokens": (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
    "batches": (batch_create_params.BatchCreateParams, CreateBatch),
}
# Values in the SDKs that the gateway refuses.
REFUSED_VALUES = {
    "chat.messages.role = function",  # OpenAI's name for tool until 2023
    "beta messages.thinking.display = updates",
}


def options(annotation: Any) -> Iterator[Any]:
    """The possible types of a value: the branches of unions, without wrappers."""
    origin = get_origin(annotation)
    if origin in (Required, NotRequired, Annotated):
        yield from options(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for branch in get_args(annotation):
            yield from options(branch)
    else:
        yield annotation


def leaves(annotation: Any) -> Iterator[Any]:
    """Like `options`, with the element types of lists in place of the lists."""
    for each in options(annotation):
        origin = get_origin(each)
        if isinstance(origin, type) and issubclass(origin, (list, Iterable)) and origin is not dict:
            yield from leaves(get_args(each)[0])
        else:
            yield each


def objects(annotation: Any) -> list[Any]:
    return [each for each in leaves(annotation) if getattr(each, "__annotations__", None)]


def values(annotation: Any) -> set[object]:
    found = [each for each in leaves(annotation) if get_origin(each) is Literal]
    return {value for each in found for value in get_args(each)}


def fields(kind: Any) -> dict[str, Any]:
    if issubclass(kind, BaseModel):
        return {info.alias or name: info.annotation for name, info in kind.model_fields.items()}
    return get_type_hints(kind, include_extras=True)


def may_be_null(annotation: Any) -> bool:
    return bool({type(None), Any} & set(options(annotation)))


def unknown(path: str, theirs: Any, ours: Any, within: Sequence[Any] = ()) -> Iterator[str]:
    """The fields and values that the SDK's type has at this place and ours lacks.

    `test_sdk_parameters` checks kinds of objects that have no counterpart here.
    """
    known = values(ours)
    if known:
        yield from (f"{path} = {value}" for value in values(theirs) - known)
    if may_be_null(theirs) and not may_be_null(ours) and len(within) > 1:
        yield f"{path} = null"
    for kind in objects(theirs):
        if kind in within:
            continue
        tags = values(fields(kind).get("type", Any))
        for own in objects(ours):
            if not tags or tags & values(fields(own).get("type", Any)):
                yield from _missing(path, fields(kind), fields(own), (*within, kind))
                break


def _missing(
    path: str, theirs: dict[str, Any], ours: dict[str, Any], within: Sequence[Any]
) -> Iterator[str]:
    for name, annotation in theirs.items():
        if name in ours:
            yield from unknown(f"{path}.{name}", annotation, ours[name], within)
        elif len(within) > 1:
            yield f"{path}.{name}"


def test_every_field_of_a_requests_objects_is_known() -> None:
    found = {
        each for name, (theirs, ours) in REQUESTS.items() for each in unknown(name, theirs, ours)
    }
    assert found == REFUSED_VALUES


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_an_item_of_responses_is_known(kind: str) -> None:
    params = response_create_params.ResponseCreateParamsBase
    items = objects(get_type_hints(params, include_extras=True)["input"])
    theirs = [item for item in items if kind in values(fields(item).get("type", Any))]
    assert theirs
    for item in theirs:
        # Null items are dropped when they are read.
        missing = {each for each in unknown(kind, item, KINDS[kind]) if not each.endswith("null")}
        missing |= fields(item).keys() - fields(KINDS[kind]).keys()
        assert missing == set(), item
