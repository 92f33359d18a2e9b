"""From one choice's text to its parts: reasoning, text and calls, in the form asked for."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from headrace_common.tokenizer import Tokenizer

from .parts import Part, PartList, Text
from .reasoning.catalog import FAMILIES, think_parser
from .reasoning.think import ThinkParser
from .tool_calls.base import ToolParser
from .tool_calls.catalog import MISTRAL, PARSERS
from .tool_calls.forced import NamedParser, RequiredParser

# How calls are read that a grammar makes: as one named tool's arguments, or as an array.
NAMED, REQUIRED = "named", "required"

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How texts are read, and what of the request its answer repeats. It is kept with requests.

    `calls` is a parser's name, NAMED or REQUIRED; None where texts are never calls. `kinds`: how
    arguments of tools are written, for parsers that must know. `short_ids`: ids of calls are as
    Mistral's templates want them. `echo` is JSON of the API in question.
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
        self._tools = _tool_parser(form, self._calls)
        self._think: ThinkParser | None = None
        self._closing: int | None = None
        self._thought = 0
        self._counted = False
        if form.reasoning is not None:
            self._think = think_parser(form.reasoning, tokenizer, prompt)
            self._closing = tokenizer.token_to_id(FAMILIES[form.reasoning].closing)

    @property
    def calls(self) -> int:
        """How many have begun."""
        return self._calls.calls

    @property
    def reasoning_tokens(self) -> int:
        """With the closing marker."""
        return self._thought if self._think is not None and self._think.seen else 0

    def push(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        """The parts of more text, of which these are the tokens."""
        if self._think is None:
            return self._read(text)
        if not self._think.over:
            self._count(token_ids)
        return self._read_all(self._think.push(text))

    def finish(self) -> list[Part]:
        """The parts that were held back: to be called once, at the end."""
        parts = [] if self._think is None else self._read_all(self._think.finish())
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

    def _count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._thought += not self._counted
            self._counted = self._counted or token_id == self._closing


def call_id(form: OutputForm, answer_id: str, choice: int, index: int, prefix: str) -> str:
    """A call's id. The same whenever and wherever the answer is made again."""
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
    """Whether a model whose calls are read by this parser wants short ids back."""
    return calls == MISTRAL
