"""The texts that a structural tag allows: with calls in them, and with reasoning before them."""

from typing import Any

import pytest
from llguidance import LLMatcher

from headrace_common.structured.grammars import GrammarChecker, grammar_text, parser_limits
from headrace_common.structured.structural_tag import (
    ReasoningBegin,
    ReasoningFormat,
    StructuralTag,
    Structure,
    read,
    tagged,
)
from headrace_common.structured.structured import StructuredOutputsParams

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
STRUCTURES = (
    Structure('<call>{"name": "weather", "arguments": ', CITY, "}</call>"),
    Structure('<call>{"name": "any", "arguments": ', {"type": "object"}, "}</call>"),
    Structure("[n=", {"type": "integer"}, ""),
)
TRIGGERS = ("<call>", "[n")
CALL = '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call>'
ANY = '<call>{"name": "any", "arguments": {"x": [1, "a"]}}</call>'
BAD = CALL.replace("Rome", "Oslo")


def verdict(begin: ReasoningBegin | None, text: str) -> str:
    """Whether a text is complete, only a beginning, or refused."""
    reasoning = None if begin is None else ReasoningFormat("<think>", "[/THINK]", begin)
    tag = StructuralTag(tagged(STRUCTURES, TRIGGERS), reasoning)
    assert read(tag.to_json()) == tag
    structured = StructuredOutputsParams(structural_tag=tag.to_json())
    checker = GrammarChecker()
    checker.check(structured)
    matcher = LLMatcher(checker._bytes, grammar_text(structured), limits=parser_limits())
    content = text.encode()
    if matcher.try_consume_tokens(list(content)) < len(content):
        return "refused"
    return "whole" if matcher.is_accepting() else "part"


@pytest.mark.parametrize("begin", [None, ReasoningBegin.OPEN])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "whole"),
        ("Grüße, 1 < 2, <cal and [m", "whole"),
        (f"Well. {CALL}", "whole"),
        (f"{CALL}\n{ANY} and [n=3, done", "whole"),
        (CALL[:-1], "part"),
        ("x <call>", "part"),
        ("<call>{'name", "refused"),
        ("<call>  ", "refused"),
        (f"{ANY}{BAD}", "refused"),
        ("[n=x", "refused"),
        (CALL.replace("weather", "unknown"), "refused"),
    ],
)
def test_a_text_that_begins_with_a_trigger_must_match_its_structure(
    begin: ReasoningBegin | None, text: str, expected: str
) -> None:
    assert verdict(begin, text) == expected


@pytest.mark.parametrize(
    ("begin", "opening"),
    [
        (ReasoningBegin.INSIDE, ""),
        (ReasoningBegin.INSIDE, "<think>"),
        (ReasoningBegin.OPEN, "\n<think>"),
    ],
)
def test_in_reasoning_triggers_are_words(begin: ReasoningBegin, opening: str) -> None:
    thought = f"{opening}a <call> or [n? {BAD}"

    assert verdict(begin, thought) == "whole"
    assert verdict(begin, f"{thought}[/THINK] so {CALL} then") == "whole"
    assert verdict(begin, f"{thought}[/THINK]{BAD}") == "refused"
