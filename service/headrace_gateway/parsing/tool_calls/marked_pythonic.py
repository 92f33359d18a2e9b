"""Calls as Python writes them between two markers, within text: LFM2's and Olmo 3's.

`<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>`, or one in each line. Each call is passed on
when it is complete.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace_common.structured.structural_format import Const, Format, Rules

from ..parts import PartList
from .base import BufferedBody
from .call_object import Status
from .constraint import CallConstraint, sequence
from .python_call import MAX_CALL_CHARS, CallEnd, parsed_call
from .python_call_format import call_format, call_rules
from .scanning import SPACE

LFM2, OLMO3 = "lfm2", "olmo3"


@dataclass(frozen=True, slots=True)
class Block:
    """The texts `before`, `between` and `after` the calls."""

    opening: str
    closing: str
    before: str
    between: str
    after: str


BLOCKS: Mapping[str, Block] = {
    LFM2: Block("<|tool_call_start|>", "<|tool_call_end|>", "[", ", ", "]"),
    OLMO3: Block("<function_calls>", "</function_calls>", "\n", "\n", "\n"),
}


class BlockBody(BufferedBody):
    def __init__(self, parts: PartList, block: Block) -> None:
        super().__init__(parts)
        self._block = block
        self._passed = SPACE + "".join({block.before, block.between, block.after})
        self._end: CallEnd | None = None

    @property
    def raw(self) -> str:
        """The text that was read. Empty if it may hold another marker, as it is then returned."""
        return self._buffer if self.status is Status.OPEN and not self.committed else ""

    def _step(self) -> bool:
        """Reads one call, or the closing; returns False if it needs more text."""
        seen = self._buffer.lstrip(self._passed)
        if seen.startswith(self._block.closing):
            return self._leave(seen[len(self._block.closing) :])
        if self._block.closing.startswith(seen):
            return False
        begin = len(self._buffer) - len(seen)
        if self._end is None:
            self._end = CallEnd(begin)
        end = self._end.find(self._buffer)
        if self._end.unfit or (end or len(self._buffer)) - begin > MAX_CALL_CHARS:
            return self._leave(seen)
        return end is not None and self._take(seen, end - begin)

    def _take(self, seen: str, end: int) -> bool:
        call = parsed_call(seen[:end].strip())
        if call is None:
            return self._leave(seen)
        self.committed, self._buffer, self._end = True, seen[end:], None
        self._parts.start(call[0])
        self._parts.arguments(call[1])
        return True

    def _leave(self, rest: str) -> bool:
        """Ends the block; without a call, all that was read is text."""
        self.status = Status.DONE if self.committed else Status.FAILED
        self._buffer = rest if self.committed else self._buffer
        return False


def marked_pythonic_format(constraint: CallConstraint, block: Block) -> Format:
    calls = constraint.calls(constraint.each(call_format), Const(block.between))
    content = sequence(Const(block.before), calls, Const(block.after))
    return Rules(call_rules(constraint), constraint.block(block.opening, content, block.closing))
