"""Hermes' and Qwen's format: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from headrace_common.structured.structural_format import Format, Tag

from ..parts import PartList
from .base import Body
from .call_object import CallObject
from .closed import ClosedBody
from .constraint import CallConstraint, Function

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def hermes_body(parts: PartList) -> Body:
    return ClosedBody(CallObject(parts), CLOSE)


def hermes_format(constraint: CallConstraint) -> Format:
    def tag(function: Function) -> Tag:
        begin = f'{OPEN}\n{{"name": {function.quoted}, "arguments": '
        return Tag(begin, function.arguments, f"}}\n{CLOSE}")

    return constraint.tagged(OPEN, [*map(tag, constraint.functions)])
