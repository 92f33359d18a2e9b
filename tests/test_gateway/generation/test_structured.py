"""Structured output at the gateway: each field that asks for it, and what is refused."""

import asyncio
from typing import Any

import pytest

from headrace_common.structured.grammar_checks import GrammarChecks, GrammarsBusy
from headrace_common.structured.structured import StructuredOutputsParams
from headrace_gateway.generation.constraints import Constraints
from headrace_gateway.schemas.completions import UNSUPPORTED
from headrace_testing.gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
TAG = {"structures": [{"begin": "<f", "schema": SCHEMA, "end": ">"}], "triggers": ["<"]}
TEXTS = {"format": {"type": "or", "elements": [{"type": "const_string", "value": "a"}]}}
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": FORMAT}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, {"grammar": 'start: "x"'}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"structured_outputs": {"structural_tag": TAG}}, {"structural_tag": TAG}),
    ({"structured_outputs": {"structural_tag": TEXTS}}, {"structural_tag": TEXTS}),
    ({"response_format": {"type": "structural_tag", **TEXTS}}, {"structural_tag": TEXTS}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ["a"]}),
    ({"guided_grammar": 'root ::= "x"'}, {"grammar": 'root ::= "x"'}),
    ({"response_format": {"type": "text"}, "guided_choice": ["a"]}, {"choice": ["a"]}),
]


@pytest.mark.parametrize(("fields", "expected"), FIELDS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_every_field_reaches_the_engine(
    gateway: Gateway, path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    answer = await getattr(gateway, path)(**fields)

    assert answer.status_code == 200, answer.text
    (request,) = gateway.engine.submitted
    assert request.sampling.structured_outputs == StructuredOutputsParams(**expected)


@pytest.mark.parametrize("fields", [{"response_format": {"type": "text"}}, {}])
async def test_text_is_not_constrained(gateway: Gateway, fields: dict[str, Any]) -> None:
    await gateway.chat(**fields)

    assert gateway.engine.submitted[0].sampling.structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "hello"}, "guided_grammar", "neither Lark"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-around"),
        ({"guided_json": {"type": "thing"}}, "guided_json", "Invalid type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "must be lists"),
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "n", "schema": {"$ref": "#"}}}},
            "response_format",
            "leads only to itself",
        ),
    ],
)
async def test_grammars_that_no_engine_can_compile_are_refused_with_field_and_reason(
    gateway: Gateway, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = await gateway.chat(**fields)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["code"] == "invalid_structured_output" and message in error["message"]
    assert error["message"].startswith(f"{param}: ")
    assert not gateway.engine.submitted


async def test_schemas_of_tools_are_checked_too(gateway: Gateway) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "x"}}}}
    tools = [{"type": "function", "function": function}]

    answer = await gateway.chat(tools=tools, tool_choice="required")

    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


async def test_bad_words_are_spelled_for_the_engine(gateway: Gateway) -> None:
    await gateway.complete(bad_words=["water"], allowed_token_ids=[5, 6])

    sampling = gateway.engine.submitted[0].sampling
    tokenizer = gateway.engine.tokenizer
    spelled = [tokenizer.decode(ids) for ids in sampling.bad_words_token_ids]
    assert spelled[0] == "water" and set(spelled) <= {"water", " water"}
    assert sampling.allowed_token_ids == [5, 6]


async def test_the_fields_are_in_the_api_document(gateway: Gateway) -> None:
    schemas = gateway.app.openapi()["components"]["schemas"]

    for body in ("ChatRequest", "CompletionRequest"):
        fields = schemas[body]["properties"].keys()
        assert {"response_format", "structured_outputs", "guided_json", "bad_words"} <= fields
        assert not fields & UNSUPPORTED.keys() & {"response_format", "structured_outputs"}
    assert "schema" in schemas["JsonSchema"]["properties"]


@pytest.mark.parametrize(("tenant", "status"), [(True, 429), (False, 503)])
async def test_a_check_that_cannot_be_made_now_is_answered_with_when_to_come_back(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tenant: bool, status: int
) -> None:
    async def check(*_: object) -> None:
        raise GrammarsBusy("too many schemas and grammars are being compiled", tenant=tenant)

    monkeypatch.setattr(GrammarChecks, "check", check)
    answer = await gateway.chat(structured_outputs={"regex": "not checked before"})

    assert answer.status_code == status
    assert answer.json()["error"]["code"] == "grammars_busy"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_the_time_of_a_constraints_check_counts_towards_the_deadline(
    gateway: Gateway, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(*_: object) -> None:
        await asyncio.sleep(0.05)

    monkeypatch.setattr(Constraints, "check", check)
    gateway.http.headers["x-request-timeout"] = "0.02"
    try:
        answer = await getattr(gateway, path)(guided_regex="a+")
    finally:
        del gateway.http.headers["x-request-timeout"]

    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert gateway.engine.submitted == []
