"""Patterns with ASCII-only classes, compared with Python's `re.ASCII`, character by character."""

import json
import re

import pytest

from headrace_common.structured.ascii_classes import ascii_lark, ascii_regex, ascii_schema
from headrace_common.structured.grammars import GrammarChecker, grammar_text, parser_limits
from headrace_common.structured.structured import StructuredOutputsParams

CHARACTERS = "0aZ_-\\\t\n\r\x1c \u00a0\u00e9\u0663\u2003"
PATTERNS = [
    r"\d",
    r"\D",
    r"\w",
    r"\W",
    r"\s",
    r"\S",
    r"[\d]",
    r"[\W_]",
    r"[^\s\d]",
    r"[\w-]",
    r"\\",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_kind_of_constraint_reads_classes_as_python_does(pattern: str) -> None:
    expected = [one for one in CHARACTERS if re.fullmatch(pattern, one, re.ASCII)]
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    kinds = {
        "regex": StructuredOutputsParams(regex=pattern),
        "grammar": StructuredOutputsParams(grammar=f"start: T\nT: /{pattern}/"),
        "tag": StructuredOutputsParams(
            structural_tag={"format": {"type": "regex", "pattern": pattern}}
        ),
    }
    for name, structured in kinds.items():
        assert [one for one in CHARACTERS if accepts(structured, one)] == expected, name
    json_schema = StructuredOutputsParams(json=schema)
    quoted = [json.dumps(one, ensure_ascii=False) for one in CHARACTERS]
    assert [json.loads(one) for one in quoted if accepts(json_schema, one)] == expected


def test_other_escapes_are_unchanged() -> None:
    assert ascii_regex(r"\\d\.\p{L}\x64") == r"\\d\.\p{L}\x64"


def test_only_expressions_of_a_grammar_change() -> None:
    grammar = 'start: "\\d" T // \\d\nT: /\\/\\d/ # \\d'

    assert ascii_lark(grammar) == 'start: "\\d" T // \\d\nT: /\\/[0-9]/ # \\d'


def test_only_patterns_of_a_schema_change() -> None:
    kept = {"const": {"pattern": r"\d"}, "enum": [r"\d"], "description": r"\d"}
    schema = {
        **kept,
        "properties": {"const": {"pattern": r"\d"}, "pattern": {"type": "string"}},
        "patternProperties": {r"\d": {"items": [{"pattern": r"\d"}]}},
    }

    assert ascii_schema(schema) == {
        **kept,
        "properties": {"const": {"pattern": "[0-9]"}, "pattern": {"type": "string"}},
        "patternProperties": {"[0-9]": {"items": [{"pattern": "[0-9]"}]}},
    }


def accepts(structured: StructuredOutputsParams, text: str) -> bool:
    from llguidance import LLMatcher

    vocabulary = GrammarChecker()._bytes
    matcher = LLMatcher(vocabulary, grammar_text(structured), log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
