"""Splits one choice's text into parts: reasoning, text and tool calls."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from headrace_common.text.tokenizer import Tokenizer

from .harmony.header import OPENAI, OPENAI_GPTOSS, begin_of
from .harmony.parser import HarmonyParser
from .harmony.tokens import HarmonyTokens
from .parts import Part, PartList, Text
from .reasoning.catalog import FAMILIES, think_parser
from .reasoning.think import ThinkParser, ThinkTokens
from .tool_calls.base import ToolParser
from .tool_calls.catalog import MISTRAL, PARSERS
from .tool_calls.forced import NamedParser, RequiredParser

# Parsers of calls that a grammar forces: one named tool's arguments, or an array.
NAMED, REQUIRED = "named", "required"

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How the model's text is parsed, and which fields of the request its answer repeats.

    It is stored with requests. `calls` is a parser's name, NAMED or REQUIRED; None if texts are
    never calls. `kinds` has the JSON type of each tool's parameters, for parsers that need it. With
    `short_ids`, ids of calls are as short as Mistral's templates want them. `echo` is JSON in the
    form of the request's API.
    """

    calls: str | None = None
    tools: tuple[str, ...] = ()
    kinds: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: _NOTHING)
    single_call: bool = False
    short_ids: bool = False
    reasoning: str | None = None
    echo: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)

    @property
    def parsed(self) -> bool:
        """Whether a text can be anything but text."""
        return self.calls is not None or self.reasoning is not None

    def with_echo(self, echo: Mapping[str, Any]) -> "OutputForm":
        return replace(self, echo=echo)

    def encode(self) -> str:
        if self == PLAIN:
            return ""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        content |= {"echo": dict(self.echo), "kinds": dict(self.kinds)}
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "OutputForm":
        if not text:
            return PLAIN
        content = json.loads(text)
        known = {each.name: content[each.name] for each in fields(cls) if each.name in content}
        return cls(**{**known, "tools": tuple(content["tools"])})


PLAIN = OutputForm()


class OutputParser:
    """Reads one choice's text. `prompt` tells whether it begins within reasoning."""

    def __init__(self, form: OutputForm, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._calls = PartList(1 if form.single_call else None)
        self._tools: ToolParser | None = None
        self._reasoning: ThinkParser | HarmonyParser | None = None
        self._reasoning_counter: ThinkTokens | HarmonyTokens | None = None
        if form.reasoning == OPENAI_GPTOSS:
            begin = begin_of(tokenizer, prompt)
            known = form.tools if form.calls == OPENAI else None
            self._reasoning = HarmonyParser(self._calls, known, begin)
            self._reasoning_counter = HarmonyTokens(tokenizer, known, begin)
        elif form.reasoning is not None:
            closing = tokenizer.token_to_id(FAMILIES[form.reasoning].closing)
            self._reasoning = think = think_parser(form.reasoning, tokenizer, prompt)
            self._reasoning_counter = ThinkTokens(think, closing)
        if form.reasoning != OPENAI_GPTOSS or form.calls != OPENAI:
            self._tools = _tool_parser(form, self._calls)

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return self._calls.calls

    @property
    def reasoning_tokens(self) -> int:
        """The number of reasoning tokens, with the markers around them."""
        return 0 if self._reasoning_counter is None else self._reasoning_counter.total

    def push(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        """Reads the next text, which consists of these tokens; returns the parts that it ends."""
        if self._reasoning is None:
            return self._read(text)
        if self._reasoning_counter is not None:
            self._reasoning_counter.push(token_ids)
        return self._read_all(self._reasoning.push(text))

    def finish(self) -> list[Part]:
        """Returns the parts that were held back. Call it once, at the end."""
        parts = [] if self._reasoning is None else self._read_all(self._reasoning.finish())
        return parts if self._tools is None else parts + self._tools.finish()

    def _read_all(self, parts: list[Part]) -> list[Part]:
        read: list[Part] = []
        for part in parts:
            read += self._read(part.text) if isinstance(part, Text) else [part]
        return read

    def _read(self, text: str) -> list[Part]:
        if self._tools is not None:
            return self._tools.push(text)
        return [Text(text)] if text else []


def call_id(form: OutputForm, answer_id: str, choice: int, index: int, prefix: str) -> str:
    """Returns a call's id. Every gateway that builds this answer again gives the same id."""
    digest = hashlib.sha256(f"{answer_id}:{choice}:{index}".encode()).hexdigest()
    return digest[:9] if form.short_ids else f"{prefix}{digest[:24]}"


def _tool_parser(form: OutputForm, parts: PartList) -> ToolParser | None:
    if form.calls is None:
        return None
    if form.calls == NAMED:
        return NamedParser(parts, form.tools[0])
    if form.calls == REQUIRED:
        return RequiredParser(parts, form.tools)
    return PARSERS[form.calls](parts, {name: form.kinds.get(name, _NOTHING) for name in form.tools})


def writes_short_ids(calls: str | None) -> bool:
    """Whether a model whose calls this parser reads wants short ids back."""
    return calls == MISTRAL
