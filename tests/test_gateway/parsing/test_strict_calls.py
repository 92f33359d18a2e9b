"""Calls of strict tools are valid in every format.

A model that chooses at random is constrained by the grammar, token by token; the format's parser
reads its text, and the calls' arguments are checked against the schemas.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from headrace_common.sampling.params import SamplingParams
from headrace_common.structured.grammars import GrammarChecker, grammar_text, parser_limits
from headrace_common.structured.structural_format import Const, Json, Rule, Rules
from headrace_common.structured.structured import StructuredOutputError, StructuredOutputsParams
from headrace_common.text.tokenizer import Tokenizer
from headrace_gateway.parsing.output import OutputForm, OutputParser
from headrace_gateway.parsing.parts import CallArguments, CallStart
from headrace_gateway.parsing.strict_calls import at_prompt, forced_calls, strict_calls
from headrace_gateway.parsing.tool_calls.arguments import kinds
from headrace_gateway.parsing.tool_calls.catalog import FORMATS, MARKERS
from headrace_gateway.schemas.chat_messages import FunctionDefinition, Tool
from headrace_testing.call_examples import EXAMPLES
from headrace_testing.tokenizers import byte_level_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "river": {"enum": ["Po", "Isar", "Inn"]},
        "near": {"type": ["string", "null"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        "place": {"$ref": "#/$defs/Place"},
        "sure": {"type": "boolean"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
        "mixed": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    },
    "required": ["river", "days", "place", "sure"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "in": {"$ref": "#/$defs/Kind"}},
            "required": ["x", "in"],
            "additionalProperties": False,
        },
        "Kind": {"enum": ["a", "b"]},
    },
}
PLACE: dict[str, Any] = {**SCHEMA["$defs"]["Place"], "$defs": SCHEMA["$defs"]}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"weather": SCHEMA, "now": NOTHING}
# The first words with which a model begins a call.
OPENINGS = {
    "llama3_json": '{"name": "',
    "pythonic": "[weather(",
    "openai": "<|channel|>commentary to=functions.",
    **{
        name: markers[0]
        for name, markers in MARKERS.items()
        if name not in ("llama3_json", "pythonic", "openai")
    },
}
# Texts that random choices would hardly ever give.
CLOSERS = ("</parameter>", "</arg_value>", '"', "}", "]", ")")
TEMPLATES = {"mistral": ("", "[TOOL_CALLS][ARGS]", "[TOOL_CALLS][CALL_ID][ARGS]")}
STEPS = 3000


@cache
def tokenizer(kind: str) -> tuple[Tokenizer, LLTokenizer]:
    """The markers are special tokens, other added tokens, or ordinary text."""
    backend = byte_level_tokenizer()
    if kind != "text":
        texts = sorted(
            {text for markers in MARKERS.values() for text in markers if text}
            | {"<think>", "</think>"}
        )
        special = kind == "special"
        backend.add_tokens([AddedToken(t, special=special, normalized=False) for t in texts])
    made = Tokenizer(backend, special_tokens={}, eos_token_ids=[0])
    return made, LLTokenizer(made.to_json(), n_vocab=made.vocab_size, eos_token=0)


def tools(*, strict: bool = True) -> list[Tool]:
    return [
        Tool(
            type="function",
            function=FunctionDefinition(name=name, parameters=dict(schema), strict=strict),
        )
        for name, schema in SCHEMAS.items()
    ]


def form_of(name: str, *, once: bool = False, reasoning: str | None = None) -> OutputForm:
    return OutputForm(
        calls=name,
        tools=tuple(SCHEMAS),
        kinds={tool: kinds(schema) for tool, schema in SCHEMAS.items()},
        single_call=once,
        reasoning=reasoning,
    )


def matcher_of(held: StructuredOutputsParams, kind: str) -> LLMatcher:
    text, vocabulary = tokenizer(kind)
    special = {
        word: token_id
        for word, token_id in text.added_tokens.items()
        if vocabulary.is_special_token(token_id)
    }
    matcher = LLMatcher(
        vocabulary, grammar_text(held, special), log_level=0, limits=parser_limits()
    )
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def sampled(
    held: StructuredOutputsParams,
    kind: str,
    opening: str,
    seed: int,
    words: Sequence[str] = CLOSERS,
) -> tuple[str, list[int]]:
    """The output of a model that chooses at random among these words, after its first ones."""
    text, _ = tokenizer(kind)
    matcher = matcher_of(held, kind)
    chance = random.Random(seed)
    ids = text.encode(opening)
    assert not ids or matcher.consume_tokens(ids), (opening, matcher.get_error())
    while len(ids) < STEPS:
        step = (
            [0]
            if matcher.is_accepting() and chance.random() < 0.2
            else _step(text, matcher, chance, words)
        )
        assert matcher.consume_tokens(step), matcher.get_error()
        if step == [0]:
            return text.decode(ids, skip_special_tokens=False), ids
        ids += step
        if matcher.is_stopped():
            return text.decode(ids, skip_special_tokens=False), ids
    raise AssertionError(f"it never ends: {text.decode(ids, skip_special_tokens=False)[:400]}")


def _step(
    text: Tokenizer, matcher: LLMatcher, chance: random.Random, words: Sequence[str]
) -> list[int]:
    if chance.random() < 0.3:
        spelling = text if chance.random() < 0.7 else tokenizer("text")[0]
        closer = spelling.encode(chance.choice(words))
        if matcher.validate_tokens(closer) == len(closer):
            return closer
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    allowed = [number for number in range(text.vocab_size) if bits >> number & 1]
    added = [each for each in allowed if each >= 400]
    return [chance.choice(added if added and chance.random() < 0.3 else allowed)]


def calls_of(text: str, ids: list[int], form: OutputForm) -> list[tuple[str, str]]:
    parser = OutputParser(form, tokenizer("text")[0], [])
    found: list[tuple[str, str]] = []
    for part in [*parser.push(text, ids), *parser.finish()]:
        if isinstance(part, CallStart):
            found.append((part.name, ""))
        elif isinstance(part, CallArguments):
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    return found


def check(calls: list[tuple[str, str]]) -> None:
    for tool, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[tool])


@pytest.mark.parametrize("kind", ["text", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_random_choices_make_valid_calls(name: str, kind: str) -> None:
    for number, template in enumerate(TEMPLATES.get(name, ("<|python_start|>",))):
        form = form_of(name)
        held = strict_calls(tools(), form, template)
        assert held is not None
        for seed in range(2):
            text, ids = sampled(held, kind, OPENINGS[name], 10 * number + seed)
            calls = calls_of(text, ids, form)
            assert calls, text
            check(calls)


@pytest.mark.parametrize("name", FORMATS)
def test_no_output_contains_an_invalid_call(name: str) -> None:
    form = form_of(name, reasoning="qwen3")
    held = strict_calls(tools(), form, "")
    assert held is not None
    example = EXAMPLES[name]
    words = [example[place : place + 9] for place in range(0, len(example), 9)]
    for seed in range(3):
        text, ids = sampled(held, "special", "", seed, [*CLOSERS, *MARKERS[name], *words, example])
        check(calls_of(text, ids, form))


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"openai"}))
def test_forced_calls_may_follow_reasoning_and_nothing_else(name: str) -> None:
    form = form_of(name, once=True, reasoning="qwen3")
    held = forced_calls(tools(), form, TEMPLATES.get(name, ("",))[-1])
    assert held is not None
    text, ids = sampled(held, "special", "<think>This {x}, or [so]?</think>", 7)
    calls = calls_of(text, ids, form)

    assert len(calls) == 1, text
    check(calls)
    assert not allowed(held, "special", [*tokenizer("special")[0].encode("<think>So"), 0])


@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_valid_and_nothing_else(name: str) -> None:
    form = form_of(name, once=True)
    held = forced_calls(tools(), form, TEMPLATES.get(name, ("",))[-1])
    assert held is not None
    GrammarChecker().check(held)
    text, ids = sampled(held, "special", "", 7)
    calls = calls_of(text, ids, form)

    assert len(calls) == 1, text
    check(calls)
    assert text[0] in ("[", OPENINGS[name][0]) and calls_of(" " + text, ids, form) == calls


@pytest.mark.parametrize("name", FORMATS)
def test_an_output_is_calls_or_an_answer_in_its_format(name: str) -> None:
    kind = "special"
    form = form_of(name, reasoning="openai_gptoss" if name == "openai" else "qwen3")
    held = strict_calls(tools(), form, TEMPLATES.get(name, ("",))[-1], Json(PLACE))
    assert held is not None
    GrammarChecker().check(held)
    text, _ = tokenizer(kind)
    begin = "<|channel|>final<|message|>" if name == "openai" else ""
    reasoning = "" if name == "openai" else "<think>Is it {x}?</think>\n\n"
    answer = begin + '{"x": 1, "in": "a"}'

    for written_before in ("", reasoning):
        assert allowed(held, kind, text.encode(written_before + answer))
        assert not allowed(held, kind, text.encode(f"{written_before}{begin}It is"))
        assert not allowed(held, kind, text.encode(f'{written_before}{begin}{{"x": "'))
        assert not allowed(held, kind, text.encode(f"{written_before}{answer} and"))
        assert not allowed(held, kind, text.encode(written_before + "\n" * 5))
    assert not allowed(held, kind, [*text.encode(reasoning[:12]), 0])  # reasoning is not an answer
    assert calls_of(answer, text.encode(answer), form) == []
    opening = "[weather(" if name.endswith("pythonic") else OPENINGS[name]
    called, ids = sampled(held, kind, reasoning + opening, 5)
    assert calls_of(called, ids, form), called
    check(calls_of(called, ids, form))


def test_constraints_of_answers_and_tools_work_together() -> None:
    for name in ("hermes", "qwen3_coder", "openai"):
        held = strict_calls(
            tools(strict=False), form_of(name), "", Rules({"yes": Const("Yes")}, Rule("yes"))
        )
        assert held is not None
        begin = "<|channel|>final<|message|>" if name == "openai" else ""
        assert allowed(held, "text", tokenizer("text")[0].encode(f"{begin}Yes"))
        assert not allowed(held, "text", tokenizer("text")[0].encode(f"{begin}No"))
    with pytest.raises(StructuredOutputError, match="names of tools"):
        strict_calls(tools(), form_of("qwen3_coder"), "", Rules({"now": Const("Yes")}, Rule("now")))


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_unconstrained_and_spelled_markers_are_not_calls(name: str) -> None:
    held = strict_calls(tools(), form_of(name), "")
    assert held is not None
    words = "Grüße, 1 < 2. It is [so] or {so}."
    words = f"<|channel|>final<|message|>{words}" if name == "openai" else words
    wrong = {
        "llama3_json": '{"name": "weather", "parameters": {"x',
        "pythonic": "[weather(x",
    }.get(name, OPENINGS[name] + "\nx")

    for kind in ("text", "special"):
        assert allowed(held, kind, tokenizer(kind)[0].encode(words))
        # With the words of a tokenizer without markers, which spells them.
        assert not allowed(held, kind, tokenizer("text")[0].encode(wrong))


def allowed(held: StructuredOutputsParams, kind: str, ids: list[int]) -> bool:
    matcher = matcher_of(held, kind)
    return matcher.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize("kind", ["text", "added"])
def test_without_parallel_calls_there_is_at_most_one_call(kind: str) -> None:
    text, _ = tokenizer(kind)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for once in (False, True):
        held = strict_calls(tools(), form_of("hermes", once=once), "")
        assert held is not None
        assert allowed(held, kind, text.encode(f"So: {call}"))
        assert allowed(held, kind, text.encode(f"So: {call}\n{call}")) is not once


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "pythonic", "qwen3_coder"])
@pytest.mark.parametrize("kind", ["text", "special"])
def test_calls_are_constrained_after_reasoning_and_are_plain_text_in_it(
    name: str, kind: str
) -> None:
    form = form_of(name, reasoning="qwen3")
    held = strict_calls(tools(), form, "")
    assert held is not None
    text, _ = tokenizer(kind)
    opening = "<think>" if kind == "text" else "\n<think>"
    thought = f"{opening}Shall I say {OPENINGS[name]}x? <think>"
    assert allowed(held, kind, text.encode(thought))
    assert not allowed(held, kind, text.encode(f"{thought}</think>\n\n{OPENINGS[name]}\nx("))

    answer, ids = sampled(held, kind, f"{thought}</think>\n\n{OPENINGS[name]}", 3)
    calls = calls_of(answer, ids, form)
    assert calls, answer
    check(calls)

    inside = at_prompt(
        SamplingParams(structured_outputs=held), form, text, text.encode("<think>\n")
    )
    assert inside.structured_outputs is not None
    assert allowed(
        inside.structured_outputs, kind, text.encode(f"so {OPENINGS[name]}x</think> Well.")
    )


ANALYSIS, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
TO_NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
# Texts that Harmony allows if calls are strict, and if they are forced.
HARMONY: list[tuple[str, bool, bool]] = [
    (f"{ANALYSIS}a < b{NEXT}{TO_NOW}{{}}", True, True),
    (" to=functions.now<|channel|>commentary json<|message|>{}", True, True),
    (f"{ANALYSIS}So.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{TO_NOW}", True, True),
    ("<|channel|>final<|message|>a <| b", True, False),
    (f"{TO_NOW}{{1", False, False),
    (f"{TO_NOW.replace('now', 'other')}", False, False),
    ("<|channel|>final<|message|>a<|end|>", False, False),
    ("text", False, False),
]


@pytest.mark.parametrize("kind", ["text", "special"])
def test_in_harmony_calls_are_constrained_after_reasoning_and_text(kind: str) -> None:
    form = form_of("openai", reasoning="openai_gptoss")
    strict, forced = strict_calls(tools(), form, ""), forced_calls(tools(), form, "")
    assert strict is not None and forced is not None
    text, _ = tokenizer(kind)
    for output, when_strict, when_forced in HARMONY:
        ids = text.encode(output)
        assert (allowed(strict, kind, ids), allowed(forced, kind, ids)) == (
            when_strict,
            when_forced,
        ), output
    assert not allowed(strict, kind, tokenizer("text")[0].encode(f"{ANALYSIS}a<|call|>"))

    prompt = tokenizer("special")[0].encode("<|start|>assistant<|channel|>final<|message|>So")
    for held, answer in ((strict, " it is."), (forced, f"{NEXT}{TO_NOW}{{}}")):
        within = at_prompt(
            SamplingParams(structured_outputs=held), form, tokenizer("special")[0], prompt
        ).structured_outputs
        assert within is not None
        assert allowed(within, "special", tokenizer("special")[0].encode(answer))


def test_non_strict_tools_stay_unconstrained_with_strict_ones() -> None:
    mixed = [*tools()[:1], *tools(strict=False)[1:]]
    examples = {
        "hermes": '<tool_call>\n{"name": "now", "arguments": {"a": [1]}}\n</tool_call>',
        "pythonic": "[now(a=[1])]",
        "qwen3_coder": "<tool_call>\n<function=now>\n<parameter=a>\n[1]</parameter>\n</function>\n"
        "</tool_call>",
    }
    for name, example in examples.items():
        assert strict_calls(tools(strict=False), form_of(name), "") is None
        held = strict_calls(mixed, form_of(name), "")
        assert held is not None
        assert allowed(held, "text", tokenizer("text")[0].encode(example))


@pytest.mark.parametrize("kind", ["text", "special"])
def test_a_texts_length_ends_at_its_first_end_marker(kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 4}}}
    definition = FunctionDefinition(name="f", parameters=schema, strict=True)
    for name, opening, closing in (
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>"),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_value>"),
    ):
        held = strict_calls([Tool(type="function", function=definition)], form_of(name), "")
        assert held is not None
        for text, fits in (("abcd", True), ("abc", False), (f"a{closing}bcdefgh", False)):
            for spelling in ("text", kind):
                ids = tokenizer(kind)[0].encode(opening) + tokenizer(spelling)[0].encode(
                    text + closing
                )
                assert allowed(held, kind, ids) is fits, (name, text)


def test_answers_that_are_json_are_not_calls_of_llama() -> None:
    held = strict_calls(tools(), form_of("llama3_json"), "")
    assert held is not None
    free = (
        '{"answer": {"name": "weather"}, "nam": [1], "type": 1} is it',
        '{"type": "a", "typed": 1}',
        '{"type": "function"}',
        "{}",
        "{ x }",
        '{"n": 1}',
    )
    for answer in free:
        assert allowed(held, "text", tokenizer("text")[0].encode(answer)), answer
    call = '{"name": "now", "parameters": {}}'
    for answer in (call, f"{call}; {call}", f'{{"type": "function", {call[1:]}'):
        assert allowed(held, "text", tokenizer("text")[0].encode(answer)), answer
    for answer in ('{"type": "a", "name": "now"', '{"name": "other"', '{"nam": 1, "name"'):
        assert not allowed(held, "text", tokenizer("text")[0].encode(answer)), answer


def properties(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields}


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("pythonic", "f", properties(**{"a-b": {}}), "'a-b' of f is not a Python identifier"),
    ("pythonic", "f", properties(**{"class": {}}), "'class' of f is not a Python identifier"),
    ("pythonic", "f-g", properties(), "'f-g' is not a Python identifier"),
    ("pythonic", "f", {"anyOf": [{}]}, "'anyOf' beside"),
    ("gemma4", "f", properties(**{"a:b": {}}), "'a:b' of f cannot be enforced"),
    ("gemma4", "f", properties(a={"allOf": [{}]}), "'allOf' is in its schema"),
    ("gemma4", "f", properties(a={"enum": [[1]]}), "an array is one of its values"),
    ("gemma4", "f", properties(a={"type": "array", "maxItems": 99}), "over 32 items"),
    ("gemma4", "f", properties(a={"required": ["b"]}), "'b' is required and not described"),
    ("qwen3_coder", "f", properties(**{"a>b": {}}), "'a>b' of f cannot be enforced"),
    ("qwen3_coder", "f", properties(a={"$ref": "#/properties/b"}), "'#/properties/b'"),
    ("qwen3_coder", "f", properties(a={"enum": ["</parameter>"]}), "is in one of its values"),
    (
        "glm45",
        "f",
        properties(a={"type": "string", "pattern": "^a|b$"}),
        "alternatives of its pattern in parentheses",
    ),
    (
        "glm45",
        "f",
        properties(a={"type": "string", "pattern": "a", "maxLength": 3}),
        "cannot be enforced together",
    ),
]


@pytest.mark.parametrize(("name", "function", "schema", "reason"), REFUSED)
def test_schemas_that_a_form_cannot_express_are_refused_by_name(
    name: str, function: str, schema: dict[str, Any], reason: str
) -> None:
    definition = FunctionDefinition(name=function, parameters=schema, strict=True)
    with pytest.raises(StructuredOutputError, match=re.escape(reason)):
        strict_calls([Tool(type="function", function=definition)], form_of(name), "")


def test_descriptions_and_titles_do_not_count_as_schema_size() -> None:
    annotations = {"description": "x" * 70_000, "default": 1, "title": "t"}
    schema = {
        "type": "object",
        **annotations,
        "properties": {
            "title": {"type": "string", **annotations},
            "b": {"items": {"anyOf": [{**annotations}]}},
        },
    }
    definition = FunctionDefinition(name="f", parameters=schema, strict=True)
    held = strict_calls([Tool(type="function", function=definition)], form_of("hermes"), "")

    assert held is not None and isinstance(held.structural_tag, str)
    assert '{"title":{"type":"string"},"b":{"items":{"anyOf":[{}]}}}' in held.structural_tag


@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3_coder"])
def test_schemas_with_endless_nesting_are_refused(name: str) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(3_000):
        schema = {"type": "object", "properties": {"a": schema}}
    definition = FunctionDefinition.model_construct(name="f", parameters=schema, strict=True)
    tool = Tool.model_construct(type="function", function=definition)
    for make in (strict_calls, forced_calls):
        with pytest.raises(StructuredOutputError):
            make([tool], form_of(name), "")
