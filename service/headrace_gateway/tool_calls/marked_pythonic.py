"""Calls as Python writes them between two markers, within text: LFM2's and Olmo 3's.

`<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>`, or one in each line. Each call is passed on
when it is complete.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace_common.structural_format import Const, Format, Rules

from ..parts import PartList
from .base import Body, MarkedParser
from .call_object import Status
from .held import Held, sequence
from .python_call import MAX_CALL_CHARS, CallEnd, parsed_call
from .python_call_format import call_format, call_rules
from .scanning import SPACE

LFM2, OLMO3 = "lfm2", "olmo3"


@dataclass(frozen=True, slots=True)
class Block:
    """`before`, `between` and `behind` the calls stand as they are written."""

    opening: str
    closing: str
    before: str
    between: str
    behind: str


BLOCKS: Mapping[str, Block] = {
    LFM2: Block("<|tool_call_start|>", "<|tool_call_end|>", "[", ", ", "]"),
    OLMO3: Block("<function_calls>", "</function_calls>", "\n", "\n", "\n"),
}


class MarkedPythonicParser(MarkedParser):
    def __init__(self, block: Block, parts: PartList) -> None:
        super().__init__(block.opening, parts)
        self._block = block

    def new_body(self) -> Body:
        return _Body(self._block, self._parts)


class _Body:
    def __init__(self, block: Block, parts: PartList) -> None:
        self.status = Status.OPEN
        self.committed = False
        self._block = block
        self._parts = parts
        self._held = ""
        self._passed = SPACE + "".join({block.before, block.between, block.behind})
        self._end: CallEnd | None = None

    @property
    def raw(self) -> str:
        """Empty where what was read may hold another marker: it is given back then."""
        return self._held if self.status is Status.OPEN and not self.committed else ""

    def push(self, text: str) -> str:
        self._held += text
        while self.status is Status.OPEN and self._step():
            pass
        if self.status is Status.OPEN:
            return ""
        rest, self._held = self._held, ""
        return rest

    def _step(self) -> bool:
        """Reads one call, or the closing; False where more of the text is needed."""
        seen = self._held.lstrip(self._passed)
        if seen.startswith(self._block.closing):
            return self._leave(seen[len(self._block.closing) :])
        if self._block.closing.startswith(seen):
            return False
        begin = len(self._held) - len(seen)
        if self._end is None:
            self._end = CallEnd(begin)
        end = self._end.find(self._held)
        if self._end.unfit or (end or len(self._held)) - begin > MAX_CALL_CHARS:
            return self._leave(seen)
        return end is not None and self._take(seen, end - begin)

    def _take(self, seen: str, end: int) -> bool:
        call = parsed_call(seen[:end].strip())
        if call is None:
            return self._leave(seen)
        self.committed, self._held, self._end = True, seen[end:], None
        self._parts.start(call[0])
        self._parts.arguments(call[1])
        return True

    def _leave(self, rest: str) -> bool:
        """Where there was no call, all that was read is text."""
        self.status = Status.DONE if self.committed else Status.FAILED
        self._held = rest if self.committed else self._held
        return False


def marked_pythonic_format(held: Held, block: Block) -> Format:
    calls = held.calls(held.each(call_format), Const(block.between))
    content = sequence(Const(block.before), calls, Const(block.behind))
    return Rules(call_rules(held), held.block(block.opening, content, block.closing))
