"""Answers in the OpenAPI document: they have types, and follow the schemas of OpenAPI 3.1."""

from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from openapi_spec_validator import OpenAPIV31SpecValidator

from headrace_common.errors import FailureCode
from headrace_gateway.schemas import answers
from headrace_testing.gateway import Gateway, events, failed, say, serve
from headrace_testing.tokenizers import write_tool_checkpoint

# Answers without a type: the document and its page, bytes of files, events, and vLLM's sentences.
UNTYPED = {
    ("post", "/v1/load_lora_adapter"),
    ("post", "/v1/unload_lora_adapter"),
    ("get", "/docs"),
    ("get", "/openapi.json"),
    ("get", "/v1/files/{file_id}/content"),
    ("get", "/v1/requests/{request_id}/events"),
    ("get", "/console/live"),
}


def test_the_document_is_valid_openapi(gateway: Gateway) -> None:
    document = gateway.app.openapi()

    assert document["openapi"].startswith("3.1")
    assert [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()] == []


def test_every_answer_in_json_has_a_type_with_fields(gateway: Gateway) -> None:
    document = gateway.app.openapi()
    untyped = {
        (method, path)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if not all(fields_of(document, answer) for answer in successes(operation))
    }

    assert untyped == UNTYPED


def test_a_type_of_an_answer_is_not_one_of_a_request(gateway: Gateway) -> None:
    schemas = gateway.app.openapi()["components"]["schemas"]
    for name in schemas.keys() & vars(answers).keys():
        fields = vars(answers)[name].__annotations__.keys()
        assert fields <= schemas[name]["properties"].keys(), name


def successes(operation: dict[str, Any]) -> list[dict[str, Any]]:
    return [answer for status, answer in operation["responses"].items() if status[0] == "2"]


def fields_of(document: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Whether the answer is JSON: an object of the document, or one of several."""
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    named = schema.get("anyOf", [schema])
    schemas = document["components"]["schemas"]
    return all(
        schemas.get(each.get("$ref", "").rpartition("/")[2], {}).get("properties") for each in named
    )


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
# For each kind of stream: its body, and the fields that some event must have.
STREAMS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "/v1/chat/completions": (
        {
            **CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True,
            "stream_options": {"include_usage": True},
            "tools": [{"type": "function", "function": FUNCTION}],
        },
        {"reasoning", "tool_calls", "logprobs", "usage", "token_ids", "stop_reason"},
    ),
    "/v1/completions": (
        {
            "prompt": ["a", "b"], "max_tokens": 100, "logprobs": 2,
            "stream_options": {"include_usage": True},
        },
        {"top_logprobs", "usage", "stop_reason"},
    ),
    "/v1/responses": (
        {"input": "Hi", "store": False, "tools": [{"type": "function", **FUNCTION}]},
        {"arguments", "part", "item", "delta", "text"},
    ),
    "/v1/messages": (
        {
            **CHAT, "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        },
        {"partial_json", "thinking", "signature", "content_block", "stop_sequence"},
    ),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tools(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A model that reasons and calls tools."""
    async with serve(write_tool_checkpoint(tmp_path_factory.mktemp("tools"))) as running:
        yield running


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.asyncio(loop_scope="session")
async def test_every_event_of_a_stream_is_of_its_documented_type(
    tools: Gateway, path: str, fails: bool
) -> None:
    tools.engine.reset()
    say(tools, f"<think>I look.</think>Wait.{CALL}")
    body, fields = STREAMS[path]
    if fails:
        tools.engine.failure = failed(FailureCode.INTERNAL)
    answer = await tools.http.post(path, json={"model": "tiny", "stream": True, **body})

    document = tools.app.openapi()
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    schema = {**closed(data["contentSchema"]), "components": closed(document["components"])}
    found = list(events(answer.text))
    for event in found:
        jsonschema.Draft202012Validator(schema).validate(event)
    assert len(found) > 1, answer.text
    assert fails or fields <= names_in(found)


def closed(schema: Any) -> Any:
    """The schema, changed so that objects have no other properties than it names. Objects that
    repeat the fields of a request may have any."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(each) for name, each in schema.items()}
    if "properties" in schema and schema.get("title") != "ResponseObject":
        made.setdefault("additionalProperties", False)
    return made


def names_in(found: Any) -> set[str]:
    """The names of all fields, at any depth."""
    if isinstance(found, list):
        return set().union(*map(names_in, found))
    if not isinstance(found, dict):
        return set()
    return found.keys() | names_in(list(found.values()))
