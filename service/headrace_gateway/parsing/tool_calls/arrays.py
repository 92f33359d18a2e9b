"""Formats with an array of calls after a marker: Granite's, Phi's, Jamba's and Hunyuan's.

`<|tool_call|>[{"name": "f", "arguments": {...}}, ...]`, with or without a closing marker.
"""

from headrace_common.structured.structural_format import Const, Format, Pattern

from ..parts import PartList
from .base import Body
from .call_array import CallArray
from .closed import ClosedBody
from .constraint import CallConstraint, call_object, sequence


def array_body(parts: PartList, closing: str) -> Body:
    array = CallArray(parts)
    return ClosedBody(array, closing) if closing else array


def array_format(constraint: CallConstraint, marker: str, closing: str = "") -> Format:
    return constraint.block(marker, array(constraint), closing)


def array(constraint: CallConstraint) -> Format:
    """Returns the format of `[{...}, {...}]`."""
    return sequence(
        Pattern(r" ?\["), constraint.calls(constraint.each(call_object), Const(", ")), Const("]")
    )
