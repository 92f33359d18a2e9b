"""The constraint on a text with tool calls, from which each tool-call format makes a grammar.

Each tool-call format has a module with a function that turns a CallConstraint into a Format.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from headrace_common.structured import structural_tag
from headrace_common.structured.structural_format import (
    Alternatives,
    Concatenation,
    Const,
    Format,
    Grammar,
    Json,
    Pattern,
    Repeat,
    Tag,
    TriggeredTags,
)
from headrace_common.structured.structured import StructuredKind, StructuredOutputsParams

ANY_OBJECT: Mapping[str, Any] = MappingProxyType({"type": "object"})


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `schema` is that of its arguments; None allows any object."""

    name: str
    schema: Mapping[str, Any] | None

    @property
    def arguments(self) -> Json:
        return Json(ANY_OBJECT if self.schema is None else self.schema)

    @property
    def quoted(self) -> str:
        return json.dumps(self.name)


@dataclass(frozen=True, slots=True)
class CallConstraint:
    """The functions that may be called, and how.

    With `once`, at most one call is allowed. With `forced`, the text has only calls, or is
    `answer`. `template` is the model's chat template, for formats with variants.
    """

    functions: Sequence[Function]
    forced: bool = False
    answer: Format | None = None
    once: bool = False
    template: str = ""

    def each(self, written: Callable[[Function], Format]) -> Format:
        """Returns the format of one call of any of the functions."""
        ways = tuple(map(written, self.functions))
        return ways[0] if len(ways) == 1 else Alternatives(ways)

    def calls(self, call: Format, separator: Format | None = None) -> Format:
        """Returns the format of one call, or of several."""
        return call if self.once else Repeat(call, separator)

    def tagged(self, trigger: str, tags: Sequence[Tag], *others: tuple[str, Tag]) -> Format:
        """Returns the format of text in which each tag is a call.

        `others` are further tags that are allowed, each with its trigger.
        """
        if not self.forced:
            triggers = dict.fromkeys((trigger, *(each for each, _ in others)))
            every = (*tags, *(tag for _, tag in others))
            return TriggeredTags(tuple(triggers), every, stop_after_first=self.once)
        line = Repeat(Const("\n"), optional=True, once=True)
        return self.calls(tags[0] if len(tags) == 1 else Alternatives(tuple(tags)), line)

    def block(self, trigger: str, content: Format, end: str = "", *, prefix: str = "") -> Format:
        """Returns the format of text that may end with a block of calls.

        `prefix` follows the trigger, at the beginning of the block.
        """
        tag = Tag(trigger + prefix, content, end)
        return tag if self.forced else TriggeredTags((trigger,), (tag,), stop_after_first=True)


def call_object(function: Function, arguments: str = "arguments") -> Format:
    """Returns the format of `{"name": "f", "arguments": {...}}`."""
    return Tag(f'{{"name": {function.quoted}, "{arguments}": ', function.arguments, "}")


def answer_format(constraint: StructuredOutputsParams) -> Format:
    """Returns the format of an answer's own constraint."""
    source = constraint.source
    match constraint.kind:
        case StructuredKind.CHOICE:
            return Alternatives(tuple(map(Const, source)))
        case StructuredKind.REGEX:
            return Pattern(str(source))
        case StructuredKind.STRUCTURAL_TAG:
            return structural_tag.read(source).format
        case StructuredKind.GRAMMAR:
            return Grammar(str(source))
        case StructuredKind.JSON | StructuredKind.JSON_OBJECT:
            return Json(json.loads(str(source)) if source else ANY_OBJECT)


def sequence(*elements: Format) -> Format:
    return Concatenation(elements)
