"""Structural tags as grammars of llguidance.

If a fixed text is a token that ordinary text cannot produce (a special token, or an added one
written `<...>`), the grammar uses that token; `tokens` contains these tokens. The same text spelled
with other tokens still begins its structure, so that every reader of the text sees the same
structure.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .ascii_classes import ascii_lark, ascii_regex, ascii_schema
from .lark import lark
from .structural_format import (
    Alternatives,
    AnyText,
    Concatenation,
    Const,
    Format,
    Grammar,
    Json,
    OrderedList,
    Pattern,
    Repeat,
    Rule,
    Rules,
    Tag,
    TriggeredTags,
    Until,
)
from .structural_tag import ReasoningBegin, ReasoningFormat, StructuralTag

_SPECIAL = frozenset(r"\.+*?()|[]{}^$/")
_BLANKS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ANY = "(.|\\n)*"
_SPACE = r"[ \t\r\n]*"
# A line of a grammar in Lark: tokens of text that must follow are not forced.
NO_FORCING = '%llguidance {"no_forcing": true}'
_BEFORE = r"[ \t\r\n]{0,4}"  # bounded, since a model with few other options would repeat blanks


def tag_grammar(
    tag: StructuralTag, whitespace: str, tokens: Mapping[str, int], *, forces: bool
) -> str:
    """A tag in llguidance's form: Lark, or JSON with several grammars in Lark if the tag has
    grammars of the user. `whitespace` is the pattern between tokens of JSON; `forces`: whether
    tokens of text that must follow are forced. Raises StructuredOutputError for a grammar of the
    user."""
    writer = _Writer(whitespace, tokens)
    start = _start(writer, tag)
    options = "%llguidance {}" if forces else NO_FORCING
    text = "\n".join([options, f"start: {start}", f"TEXT: /{_ANY}/", *writer.rules, ""])
    if not writer.grammars:
        return text
    named = [{"name": name, "lark_grammar": each} for name, each in writer.grammars.items()]
    return _quoted({"grammars": [{"lark_grammar": text}, *named]})


def _start(writer: "_Writer", tag: StructuralTag) -> str:
    content = writer.defined(tag.format)
    if tag.reasoning is None:
        return writer.written(content)
    following = writer.rule(writer.written(content))
    thought = _Thought(writer, tag.reasoning).written(following)
    if tag.reasoning.begin is ReasoningBegin.INSIDE:
        return thought
    opening = tag.reasoning.opening
    opened = f"/{_BEFORE}{escaped(opening)}/"
    if opening in writer.tokens:
        opened += f" | /{_BEFORE}/ {writer.token(opening)}"
    unopened = writer.written(content, f"{_SPACE}{escaped(opening)}")
    return f"({opened}) {writer.rule(thought)} | {writer.rule(unopened)}"


class _Thought:
    """Reasoning up to its closing marker; other markers in it are plain words.

    Unless it must be closed, the text may end within it.
    """

    def __init__(self, writer: "_Writer", reasoning: ReasoningFormat) -> None:
        self._writer = writer
        self._reasoning = reasoning

    def written(self, following: str) -> str:
        writer, closing = self._writer, self._reasoning.closing
        pattern = escaped(closing)
        ends = [writer.rule(f"TEXT {json.dumps(closing, ensure_ascii=False)}", lazy=True)]
        if closing in writer.tokens:
            ends.append(f"TEXT {writer.token(closing)}")
        closed = " | ".join(ends)
        if self._reasoning.closed:
            return f"{self._words()} ({closed}) /\\n{{0,2}}/ {following}"
        unclosed = writer.terminal(f"TEXT & ~/{_ANY}{pattern}{_ANY}/")
        return f"{self._words()} (({closed}) {following} | {unclosed})"

    def _words(self) -> str:
        """The rule for texts that end with a marker's token."""
        writer, reasoning = self._writer, self._reasoning
        if reasoning.opening in writer.tokens:
            writer.token(reasoning.opening)
        closing = writer.tokens.get(reasoning.closing)
        words = sorted(writer.used - {closing})
        return f"(TEXT ({' | '.join(f'<[{word}]>' for word in words)}))*" if words else ""


class _Writer:
    """Writes a grammar's rules. `used` are the tokens that they contain so far.

    `grammars` are the user's in Lark, by the names by which rules refer to them.
    """

    def __init__(self, whitespace: str, tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.grammars: dict[str, str] = {}
        self.tokens = tokens
        self.used: set[int] = set()
        self._named: dict[str, str] = {}
        self._whitespace = whitespace
        longest_first = sorted(tokens, key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def defined(self, node: Format) -> Format:
        """The expression of a node with rules, after its rules were written."""
        if not isinstance(node, Rules):
            return node
        for name, rule in node.rules.items():
            self._named[name] = self.rule(self.written(rule))
        return node.content

    def token(self, text: str) -> str:
        token_id = self.tokens[text]
        self.used.add(token_id)
        return f"<[{token_id}]>"

    def written(self, node: Format, unless: str = "") -> str:
        """The expression of a node. `unless`: what free text must not begin with."""
        match node:
            case Const():
                return self._const(node.value)
            case Pattern():
                return f"/{_slashed(node.pattern)}/"
            case Json():
                return self._json(node.json_schema)
            case Grammar():
                return self._grammar(node.grammar)
            case AnyText():
                return self._text(node.unless, unless)
            case Until():
                return self._until(node)
            case Rule():
                return self._named[node.name]
            case _:
                return self._compound(node, unless)

    def _compound(self, node: Format, unless: str) -> str:
        match node:
            case Concatenation():
                return self._sequence(node.elements, unless)
            case Tag():
                return self._sequence((Const(node.begin), node.content, *_const(node.end)), unless)
            case Alternatives():
                return self._either([self.written(each, unless) for each in node.elements])
            case Repeat():
                return self._repeat(node, unless)
            case OrderedList():
                return self._ordered_list(node)
            case TriggeredTags():
                return self._triggered(node, unless)
        raise AssertionError(f"not a format: {node!r}")

    def _const(self, text: str) -> str:
        parts = self._splitter.split(text) if self.tokens else [text]
        return " ".join(
            self.token(part) if part in self.tokens else _quoted(part) for part in parts if part
        )

    def _json(self, schema: Mapping[str, Any]) -> str:
        guided = {**ascii_schema(schema), "x-guidance": {"whitespace_pattern": self._whitespace}}
        return f"%json {_quoted(guided)}"

    def _grammar(self, source: str) -> str:
        name = f"g{len(self.grammars)}"
        self.grammars[name] = ascii_lark(lark(source))
        return f"@{name}"

    def _text(self, *excluded: str) -> str:
        """Any text that does not begin with a match of one of the patterns."""
        without = [f"~/({_slashed(each)}){_ANY}/" for each in excluded if each]
        return self.terminal(" & ".join(["TEXT", *without])) if without else "TEXT"

    def _until(self, node: Until) -> str:
        inner = "TEXT"
        if node.pattern:
            end = escaped(node.end)
            inner = self.terminal(f"/{_slashed(node.pattern)}/ & ~/{_ANY}{end}{_ANY}/")
        ends = [self.rule(f"{inner} {_quoted(node.end)}", lazy=True)]
        if node.end in self.tokens:
            ends.append(f"{inner} {self.token(node.end)}")
        return self._either(ends)

    def _sequence(self, elements: Sequence[Format], unless: str) -> str:
        if not elements:
            return ""
        first, *others = elements
        return " ".join([self.written(first, unless), *map(self.written, others)])

    def _either(self, alternatives: Sequence[str]) -> str:
        return f"({' | '.join(alternatives)})" if len(alternatives) > 1 else alternatives[0]

    def _repeat(self, node: Repeat, unless: str) -> str:
        content = self.rule(self.written(node.content))
        written = self.rule(self.written(node.content, unless)) if unless else content
        if not node.once:
            separator = "" if node.separator is None else self.written(node.separator)
            written += f" ({separator} {content})*"
        return f"({written})?" if node.optional else f"({written})"

    def _ordered_list(self, node: OrderedList) -> str:
        """The first element that is present, then the later ones."""
        separator = _quoted(node.separator)
        firsts: list[str] = []
        following, empty = "", True
        for number in range(len(node.elements) - 1, -1, -1):
            content = self.rule(self.written(node.elements[number]))
            needed = number in node.required
            if needed:
                firsts, empty = [], False
            firsts.append(f"{content} {following}".strip())
            one = f"{separator} {content}"
            following = self.rule(f"{one if needed else f'({one})?'} {following}".strip())
        return f"({' | '.join(firsts)}){'?' if empty else ''}"

    def _triggered(self, node: TriggeredTags, unless: str) -> str:
        bodies = [self._bodies(node, trigger) for trigger in node.triggers]
        item = self._item(node, bodies, "TEXT")
        first, text = item, "TEXT"
        if unless:
            text = self._text(unless)
            first = self._item(node, bodies, text)
        if node.stop_after_first:
            return first if node.at_least_one else f"({first} | {text})"
        tail = f"{item}* TEXT"
        if node.at_least_one:
            return f"{first} {tail}"
        return f"({first} {tail} | {text})" if unless else tail

    def _item(self, node: TriggeredTags, bodies: Sequence[str], text: str) -> str:
        """Free text that ends with a trigger, and a tag's rest."""
        ways = []
        for trigger, body in zip(node.triggers, bodies, strict=True):
            ways.append(f"{self.rule(f'{text} {_quoted(trigger)}', lazy=True)} {body}")
            if trigger in self.tokens:
                ways.append(f"{text} {self.token(trigger)} {body}")
        return self.rule(" | ".join(ways))

    def _bodies(self, node: TriggeredTags, trigger: str) -> str:
        bodies = []
        for tag in node.tags:
            if tag.begin.startswith(trigger):
                begin = tag.begin[len(trigger) :]
                parts = (*_const(begin), tag.content, *_const(tag.end))
                bodies.append(self._sequence(parts, ""))
        return self.rule(" | ".join(bodies))


def escaped(text: str) -> str:
    """A regular expression that matches only this text."""
    return "".join(
        _BLANKS.get(each) or ("\\" + each if each in _SPECIAL else each) for each in text
    )


def _slashed(pattern: str) -> str:
    """A regular expression with ASCII's classes, escaped for use between slashes."""
    return re.sub(
        r"(\\[^\n])|/|\n",
        lambda found: found[1] or ("\\n" if found[0] == "\n" else "\\/"),
        ascii_regex(pattern),
    )


def _const(text: str) -> tuple[Const, ...]:
    return (Const(text),) if text else ()


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
