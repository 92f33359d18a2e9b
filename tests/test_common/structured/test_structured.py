"""Structured outputs without a model: limits, the wire format, hostile grammars."""

import json
import sys
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest

from headrace_common.sampling.params import SamplingError, SamplingParams
from headrace_common.structured import structural_tag
from headrace_common.structured.grammars import GrammarChecker
from headrace_common.structured.lark import MAX_TERMINALS
from headrace_common.structured.structured import (
    MAX_CHARS,
    MAX_CHOICES,
    MAX_TAG_CHARS,
    GuidedDecodingParams,
    StructuredOutputError,
    StructuredOutputsParams,
)
from headrace_common.wire.keys import new_request_id
from headrace_common.wire.messages import GenerateRequest, decode_request, encode_request


@pytest.fixture(scope="module")
def checker() -> GrammarChecker:
    return GrammarChecker()


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def tag(begin: str = "<f>", schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"structures": [{"begin": begin, "schema": schema or {}, "end": ""}], "triggers": ["<"]}


def chain(rules: int) -> str:
    lines = [f"R{index}: R{index + 1} R{index + 1}" for index in range(rules)]
    return "\n".join(["start: R0", *lines, f'R{rules}: "x"'])


def within(depth: int) -> dict[str, Any]:
    """A format nested within formats."""
    inner = within(depth - 1) if depth else {"type": "any_text"}
    return {"type": "sequence", "elements": [inner]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "give exactly one"),
    ({"regex": "a", "choice": ["b"]}, "give exactly one"),
    ({"json": "{"}, "not valid JSON"),
    ({"json": "[]"}, "must be a JSON object"),
    ({"json": {1, 2}}, "not valid JSON"),
    ({"json": '{"maximum": Infinity}'}, "not valid JSON"),
    ({"json": " " * MAX_CHARS + "{}"}, "over the limit"),
    ({"json": {"maximum": float("nan")}}, "not valid JSON"),
    ({"json": {"enum": ["x" * MAX_CHARS]}}, "over the limit"),
    ({"json": nested(200)}, "nested deeper"),
    ({"json": "[" * 10**4}, "not valid JSON"),
    ({"json": {"$ref": "http://127.0.0.1/secret"}}, "outside of this schema"),
    ({"json": {"properties": {"a": {"$ref": "file:///etc/passwd"}}}}, "outside of this schema"),
    ({"json": {"$ref": "#"}}, "leads only to itself"),
    (
        {
            "json": {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            }
        },
        "leads only to itself",
    ),
    ({"json": {"type": "integer", "multipleOf": 999_983}}, "too fine"),
    ({"json": {"allOf": [{"multipleOf": 99.91}, {"multipleOf": 99989}]}}, "too fine"),
    ({"regex": ""}, "not empty"),
    ({"regex": "a" * (MAX_CHARS + 1)}, "over the limit"),
    ({"choice": []}, "not empty"),
    ({"choice": "yes"}, "must be a list"),
    ({"choice": ["a", ""]}, "not empty"),
    ({"choice": ["a", 3]}, "must be a text"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, "over the limit"),
    ({"choice": ["x" * 1000] * 100}, "over the limit"),
    ({"grammar": 3}, "must be a text"),
    ({"json_object": "yes"}, "must be true"),
    ({"structural_tag": "{"}, "Expecting property name"),
    ({"structural_tag": {"tags": []}}, "'tags' is not known"),
    ({"structural_tag": {"format": {}}}, "a format's type must be one of const_string"),
    ({"structural_tag": {"format": {"type": "regex"}}}, "regex must have pattern"),
    ({"structural_tag": {"format": {"type": "any_text", "x": 1}}}, "'x' is not known"),
    ({"structural_tag": {"format": {"type": "or", "elements": []}}}, "elements must be a list"),
    ({"structural_tag": {"format": {"type": "or", "elements": 1}}}, "of the type list"),
    ({"structural_tag": {"format": within(40)}}, "nested deeper than 32"),
    (
        {"structural_tag": {"format": {"type": "sequence", "elements": [{}] * 1025}}},
        "at most 1024 elements",
    ),
    ({"structural_tag": {**tag(), "format": {"type": "any_text"}}}, "either structures"),
    ({"structural_tag": {"format": {"type": "rule", "name": "a"}}}, "there is no rule 'a'"),
    (
        {
            "structural_tag": {
                "format": {
                    "type": "rules",
                    "rules": {"a": {"type": "rule", "name": "a"}},
                    "content": {"type": "any_text"},
                }
            }
        },
        "there is no rule 'a' before",
    ),
    ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "from 1 to 128"),
    ({"structural_tag": tag(begin="f")}, "exactly one trigger"),
    ({"structural_tag": {**tag(), "triggers": ["<", "<f"]}}, "exactly one trigger"),
    ({"structural_tag": {**tag(), "triggers": ["<", "x"]}}, "no structure begins"),
    ({"structural_tag": {**tag(), "triggers": [""]}}, "1 to 1024 characters"),
    ({"structural_tag": tag(schema={"$ref": "#"})}, "leads only to itself"),
    ({"structural_tag": tag(schema={"enum": ["x" * MAX_TAG_CHARS]})}, "over the limit"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_too_large_grammars_are_refused_before_compilation(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SamplingError, match=message):
        StructuredOutputsParams(**fields)


def test_each_reference_is_followed_once() -> None:
    """Otherwise a chain of references would cost the square of its length, on the event loop."""
    links = 1_000
    definitions: dict[str, Any] = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(links)}
    definitions[str(links)] = {"type": "string"}
    schema = {"$ref": "#/$defs/0", "$defs": definitions}
    steps = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal steps
        steps += event == "call" and frame.f_code.co_name == "_resolve"

    sys.setprofile(count)
    try:
        StructuredOutputsParams(json=json.dumps(schema))
    finally:
        sys.setprofile(None)

    assert steps <= links + 1


NOT_COMPILED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "thing"}}, "Invalid type"),
    ({"json": {"enum": []}}, "Unsatisfiable"),
    ({"json": {"$ref": "#/$defs/missing"}}, "does not exist"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
    ({"json": {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]}}, "too large"),  # noqa: E501
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"regex": r"[^\s\S]"}, "no output can match"),
    ({"grammar": "start: missing"}, "unknown name"),
    ({"grammar": "start: start"}, "no output can match"),
    ({"grammar": 'start: %json {"multipleOf": 999983}'}, "%json is not supported"),
    ({"grammar": "hello"}, "neither Lark"),
    ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "neither Lark"),
    ({"grammar": "root ::= " + '"a" | ' * 5000 + '"a"'}, "GBNF may have"),
    ({"structural_tag": tag(schema={"type": "thing"})}, "Invalid type"),
    ({"grammar": chain(100)}, "too big"),
    ({"grammar": chain(MAX_TERMINALS)}, "terminals"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), NOT_COMPILED, ids=lambda value: str(value)[:40])
def test_grammars_that_cannot_be_compiled_are_refused_with_the_reason(
    checker: GrammarChecker, fields: dict[str, Any], message: str
) -> None:
    structured = StructuredOutputsParams(**fields)

    with pytest.raises(StructuredOutputError, match=message) as caught:
        checker.check(structured)
    assert caught.value.field == structured.kind


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a+)+b"},
        {"regex": "(.*a.{30}b|.*b.{40}c)"},
        {"regex": "(((a{0,1000}){0,1000}){0,1000}b)"},
        {"json": {"type": "array", "items": {"$ref": "#"}}},
        {"json": {"type": "object", "properties": {"next": {"$ref": "#"}}}},
        {"json": {"const": {"$ref": "http://data.example"}}},
        {"json": {"type": "number", "multipleOf": 0.01}},
        {"json": nested(100)},
        {"json_object": True},
        {"choice": ["a.b", "[", "é", "a\nb", '"', "a/b", "\\d"]},
        {"grammar": 'root ::= "a" rest\nrest ::= [0-9]*'},
    ],
    ids=lambda value: str(value)[:40],
)
def test_hard_but_bounded_grammars_are_accepted(
    checker: GrammarChecker, fields: dict[str, Any]
) -> None:
    checker.check(StructuredOutputsParams(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object", "properties": {"z": {}, "a": {}}}},
        {"regex": "a|b"},
        {"choice": ["b", "a"]},
        {"grammar": 'start: "x"'},
        {"json_object": True},
        {"structural_tag": tag(schema={"properties": {"z": {}, "a": {}}})},
    ],
    ids=str,
)
def test_structured_outputs_survive_encoding(fields: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields), seed=1)
    request = GenerateRequest(
        request_id=new_request_id(),
        model="m",
        prompt_token_ids=(1,),
        sampling=params,
        created_ms=1,
        deadline_ms=2,
    )

    assert decode_request(encode_request(request)) == request


def test_a_schema_is_the_same_as_text_and_as_a_mapping() -> None:
    schema = {"type": "object", "properties": {"z": {"type": "null"}, "a": {"type": "null"}}}

    one, other = (
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(
            json='{"type": "object", "properties": {"z": {"type":"null"}, "a": {"type":"null"}}}'
        ),
    )

    assert one == other and hash(one) == hash(other)
    assert str(one.json).index('"z"') < str(one.json).index('"a"')
    assert GuidedDecodingParams is StructuredOutputsParams


def test_token_lists_and_grammars_are_not_combined() -> None:
    with pytest.raises(SamplingError, match="allowed_token_ids"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), allowed_token_ids=[1])


def test_a_structural_tag_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one of a megabyte takes a quarter of a second."""
    monkeypatch.setattr(structural_tag, "read", Mock(side_effect=AssertionError))
    value = {"format": {"type": "const_string", "value": "x" * MAX_TAG_CHARS}}
    for given in (value, json.dumps(value)):
        with pytest.raises(StructuredOutputError, match="over the limit of 262144: make it small"):
            StructuredOutputsParams(structural_tag=given)
