"""Forms with an array of calls behind a marker: Granite's, Phi's, Jamba's and Hunyuan's.

`<|tool_call|>[{"name": "f", "arguments": {...}}, ...]`, with a closing marker or not.
"""

from headrace_common.structural_format import Const, Format, Pattern

from ..parts import PartList
from .base import Body, MarkedParser
from .call_array import CallArray
from .closed import ClosedBody
from .held import Held, call_object, sequence


class ArrayParser(MarkedParser):
    def __init__(self, marker: str, closing: str, parts: PartList) -> None:
        super().__init__(marker, parts)
        self._closing = closing

    def new_body(self) -> Body:
        array = CallArray(self._parts)
        return ClosedBody(array, self._closing) if self._closing else array


def array_format(held: Held, marker: str, closing: str = "") -> Format:
    return held.block(marker, array(held), closing)


def array(held: Held) -> Format:
    """`[{...}, {...}]`"""
    return sequence(Pattern(r" ?\["), held.calls(held.each(call_object), Const(", ")), Const("]"))
