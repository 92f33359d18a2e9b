"""Hermes' and Qwen's form: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from headrace_common.structural_format import Format, Tag

from ..parts import PartList
from .base import Body, MarkedParser
from .call_object import CallObject
from .closed import ClosedBody
from .held import Function, Held

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(MarkedParser):
    def __init__(self, parts: PartList) -> None:
        super().__init__(OPEN, parts)

    def new_body(self) -> Body:
        return ClosedBody(CallObject(self._parts), CLOSE)


def hermes_format(held: Held) -> Format:
    def tag(function: Function) -> Tag:
        begin = f'{OPEN}\n{{"name": {function.quoted}, "arguments": '
        return Tag(begin, function.arguments, f"}}\n{CLOSE}")

    return held.tagged(OPEN, [*map(tag, held.functions)])
