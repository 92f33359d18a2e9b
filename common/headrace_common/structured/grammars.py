"""Structured outputs as grammars of llguidance, and the check that one can be compiled.

Every cost is bounded: sizes before anything is parsed, then by the library's own limits. It needs
no model's tokenizer, so that gateways can refuse requests that no engine could run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from . import structural_tag
from .ascii_classes import ascii_lark, ascii_regex, ascii_schema
from .lark import lark
from .structural_grammar import NO_FORCING, tag_grammar
from .structured import StructuredKind, StructuredOutputError, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

# Between two tokens of JSON: nothing or one space. More would cost tokens, and a weak model could
# write blanks without end.
WHITESPACE = " ?"
# llguidance forces the tokens of a text that must follow: for each token of the output, it looks at
# the whole rest of that text. A longer constraint, or one with such a repetition, lets the model
# choose between all tokens that can continue, which takes about 0.01 ms for each token.
MAX_FORCED_CHARS = 8192
_LONG_REPETITION = re.compile(r"\{\s*\d{4}")
_SPECIAL = frozenset(r"\.+*?()|[]{}^$")
_END = 256


def grammar_text(
    structured: StructuredOutputsParams, tokens: Mapping[str, int] = MappingProxyType({})
) -> str:
    """The grammar in llguidance's form. Raises StructuredOutputError.

    `tokens` maps texts to the tokens that llguidance does not treat as text
    (LLTokenizer.is_special_token).
    """
    from llguidance import LLMatcher

    source, forces = structured.source, _forces(structured)
    match structured.kind:
        case StructuredKind.CHOICE:
            pattern = "|".join(map(_escaped, source))
            return _named_grammar(LLMatcher.grammar_from_regex(pattern), "regex", forces)
        case StructuredKind.REGEX:
            assert isinstance(source, str)
            text = LLMatcher.grammar_from_regex(ascii_regex(source))
            return _named_grammar(text, "regex", forces)
        case StructuredKind.GRAMMAR:
            assert isinstance(source, str)
            text = LLMatcher.grammar_from_lark(ascii_lark(lark(source)))
            return text if forces else f"{NO_FORCING}\n{text}"
        case StructuredKind.STRUCTURAL_TAG:
            return tag_grammar(structural_tag.read(source), WHITESPACE, tokens, forces=forces)
        case StructuredKind.JSON | StructuredKind.JSON_OBJECT:
            assert isinstance(source, str)
            text = LLMatcher.grammar_from_json_schema(
                _schema(source), defaults={"whitespace_pattern": WHITESPACE}
            )
            return _named_grammar(text, "json_schema", forces)


def parser_limits() -> "LLParserLimits":
    """The limits of one grammar: about 300 ms to build, 7 ms per step, 40 MB."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_items_in_row=700,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def error_text(error: str) -> str:
    """The first line of the library's message that says what is wrong, without dumps of state."""
    lines = error.replace("<non-verbose/>", "").strip().splitlines() or [""]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons or lines)[0].strip()[:300]


class GrammarChecker:
    """Says whether a grammar can be compiled and allows any output at all. Thread-safe.

    A check takes up to about 300 ms of CPU time, mostly without the GIL: run it in a thread.
    """

    def check(self, structured: StructuredOutputsParams) -> None:
        """Raises StructuredOutputError, which names the field and what is wrong."""
        from llguidance import LLMatcher

        text = grammar_text(structured)
        matcher = LLMatcher(self._bytes, text, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise StructuredOutputError(structured.kind, _reason(matcher.get_error()))

    @cached_property
    def _bytes(self) -> "LLTokenizer":
        """A vocabulary of single bytes."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=_END + 1, slices=[])


class _Bytes:
    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)
    tokens: Sequence[bytes] = (*(bytes((value,)) for value in range(_END)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _reason(error: str) -> str:
    if "NoExtension" in error:
        return "no output can match it"
    return error_text(error)


def _forces(structured: StructuredOutputsParams) -> bool:
    """Whether tokens of text that must follow are forced."""
    source = structured.source
    if not isinstance(source, str):
        return sum(map(len, source)) <= MAX_FORCED_CHARS
    return len(source) <= MAX_FORCED_CHARS and _LONG_REPETITION.search(source) is None


def _named_grammar(text: str, name: str, forces: bool) -> str:
    """A list of one grammar, called `name`, as llguidance makes it; options need another one."""
    if forces:
        return text
    start = json.dumps({"lark_grammar": f"{NO_FORCING}\nstart: @{name}"})
    begin = '{"grammars":['
    assert text.startswith(begin)
    return f"{begin}{start},{text.removeprefix(begin)}"


def _schema(source: str) -> str:
    if "attern" not in source:  # the usual case: neither `pattern` nor `patternProperties`
        return source or '{"type":"object"}'
    schema = ascii_schema(json.loads(source))
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _escaped(text: str) -> str:
    return "".join("\\" + letter if letter in _SPECIAL else letter for letter in text)
