"""Formats with all calls in one section, with a marker around each: DeepSeek's and Kimi's.

A section: its opening, then for each call an opening, a head with the name, the arguments, a
closing; then the section's closing, which models sometimes forget.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace_common.structured.structural_format import Const, Format, Pattern

from ..parts import PartList
from .call_object import Status
from .constraint import CallConstraint, Function, sequence
from .named_call import NAME, NamedCall
from .scanning import SPACE

DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2 = "deepseek_v3", "deepseek_v31", "kimi_k2"


@dataclass(frozen=True, slots=True)
class Section:
    """A format. `head` reads what precedes the arguments; `begin` writes it, with `number` in its
    middle."""

    opening: str
    closing: str
    call_opening: str
    call_closing: str
    head: re.Pattern[str]
    begin: tuple[str, ...]
    end: str
    separator: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing, self.call_opening, self.call_closing)


_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"
ARGUMENTS = "<|tool_call_argument_begin|>"

SECTIONS: Mapping[str, Section] = {
    DEEPSEEK_V3: Section(
        *_CALLS,
        *_CALL,
        re.compile(rf"\s*function\s*{SEPARATOR}\s*({NAME})\s*```json\s*", re.ASCII),
        (f"function{SEPARATOR}{{name}}\n```json\n",),
        "\n```",
        "\n",
    ),
    DEEPSEEK_V31: Section(
        *_CALLS,
        *_CALL,
        re.compile(rf"\s*({NAME})\s*{SEPARATOR}\s*", re.ASCII),
        (f"{{name}}{SEPARATOR}",),
        "",
    ),
    KIMI_K2: Section(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        re.compile(rf"\s*(?:functions\.)?([\w./-]{{1,128}})(?::\d+)?\s*{re.escape(ARGUMENTS)}\s*"),
        ("functions.{name}:", ARGUMENTS),
        "",
    ),
}


class SectionBody:
    """A Body that reads calls, and what is between them."""

    def __init__(self, parts: PartList, section: Section) -> None:
        self.status = Status.OPEN
        self.committed = False
        self.raw = ""
        self._section = section
        self._parts = parts
        self._call: NamedCall | None = None
        self._buffer = ""
        self._awaited: tuple[str, ...] = (section.call_opening,)

    def push(self, text: str) -> str:
        while text and self.status is Status.OPEN:
            text = self._between(text) if self._call is None else self._read(self._call, text)
        return text

    def _between(self, text: str) -> str:
        """Waits for one of the expected markers; skips space around them."""
        self._buffer += text
        marker = self._buffer.lstrip(SPACE)
        for awaited in self._awaited:
            if marker.startswith(awaited):
                self._pass(self._buffer[: len(self._buffer) - len(marker) + len(awaited)])
                self._take(awaited)
                return marker[len(awaited) :]
        if any(awaited.startswith(marker) for awaited in self._awaited):
            return ""
        rest, self._buffer = self._buffer, ""
        self.status = Status.DONE if self.committed else Status.FAILED
        return rest

    def _pass(self, text: str) -> None:
        self._buffer = ""
        if not self.committed:
            self.raw += text

    def _take(self, marker: str) -> None:
        section = self._section
        if marker == section.closing:
            self.status = Status.DONE
        elif marker == section.call_opening:
            self._call = NamedCall(self._parts, section.head)
            self._awaited = (*self._ends, section.call_opening, section.closing)

    @property
    def _ends(self) -> tuple[str, ...]:
        """Returns the texts that close a call: with the end of its arguments' frame, or without."""
        closing = self._section.call_closing
        frame = self._section.end.strip()
        return (frame, closing) if frame else (closing,)

    def _read(self, call: NamedCall, text: str) -> str:
        before = call.raw
        rest = call.push(text)
        if call.committed:
            self.committed, self.raw = True, ""
        elif not self.committed:
            self.raw += call.raw[len(before) :]
        if call.status is Status.FAILED:
            self.status = Status.DONE if self.committed else Status.FAILED
        elif call.status is Status.DONE:
            self._call = None
        return rest


def section_format(constraint: CallConstraint, section: Section) -> Format:
    def call(function: Function) -> Format:
        first, *others = (each.format(name=function.name) for each in section.begin)
        number: list[Format] = []
        if others:
            number = [Pattern("[0-9]{1,4}"), *map(Const, others)]
        end = section.end + section.call_closing
        begin = Const(section.call_opening + first)
        return sequence(begin, *number, function.arguments, Const(end))

    separator = Const(section.separator) if section.separator else None
    calls = constraint.calls(constraint.each(call), separator)
    return constraint.block(section.opening, calls, section.closing)
