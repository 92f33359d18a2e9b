"""The Pythonic format: the whole answer is a list of calls, `[f(a=1), g(b="x")]`.

Each call is passed on when it is complete, with its arguments as JSON.
"""

from collections.abc import Collection

from headrace_common.structured.structural_format import (
    Alternatives,
    AnyText,
    Const,
    Format,
    Pattern,
    Repeat,
    Rule,
    Rules,
)
from headrace_common.structured.structural_grammar import escaped

from ..parts import Part, PartList
from .constraint import CallConstraint, Function, sequence
from .python_call import MAX_CALL_CHARS, CallEnd, parsed_call
from .python_call_format import call_format, call_rules
from .scanning import skip_space

START, END = "<|python_start|>", "<|python_end|>"


class PythonicParser:
    def __init__(self, parts: PartList, known: Collection[str]) -> None:
        self._parts = parts
        self._known = known
        self._buffer = ""  # not shown yet, and not known to be a call
        self._opened = False
        self._closed = False
        self._plain = False
        self._end = CallEnd()

    def push(self, text: str) -> list[Part]:
        if self._plain:
            self._parts.text(text)
            return self._parts.take()
        self._buffer += text
        while self._step():
            pass
        return self._parts.take()

    def finish(self) -> list[Part]:
        if self._buffer.strip() or not self._parts.calls:
            self._parts.text(self._buffer)
        self._buffer = ""
        return self._parts.take()

    def _step(self) -> bool:
        """Reads one element of the buffered text; returns False if it needs more text."""
        if not self._opened:
            return self._open()
        return self._after_list() if self._closed else self._call()

    def _open(self) -> bool:
        position = skip_space(self._buffer, 0)
        if self._buffer.startswith(START, position):
            position = skip_space(self._buffer, position + len(START))
        rest = self._buffer[position:]
        if not rest or START.startswith(rest):
            return False
        if rest[0] != "[":
            return self._give_up()
        self._opened = True
        self._end = CallEnd(position + 1)
        return True

    def _call(self) -> bool:
        begin = self._end.begin
        end = self._end.find(self._buffer)
        if self._end.unfit or (end or len(self._buffer)) - begin > MAX_CALL_CHARS:
            return self._give_up()
        if end is None:
            return False
        call = parsed_call(self._buffer[begin:end].strip())
        if call is None or call[0] not in self._known:
            return self._give_up()
        after = skip_space(self._buffer, end)
        if after == len(self._buffer):
            return False
        if self._buffer[after] not in ",]":
            return self._give_up()
        self._parts.start(call[0])
        self._parts.arguments(call[1])
        self._closed = self._buffer[after] == "]"
        self._buffer = self._buffer[after + 1 :]
        self._end = CallEnd()
        return True

    def _after_list(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(END):
            self._buffer = rest[len(END) :]
        elif END.startswith(rest):
            return False
        return self._give_up() if self._buffer.strip() else False

    def _give_up(self) -> bool:
        self._plain = True
        self._parts.text(self._buffer)
        self._buffer = ""
        return False


def pythonic_format(constraint: CallConstraint) -> Format:
    """Returns the format: a list of calls, or text that begins no such list."""
    return Rules(
        call_rules(constraint),
        sequence(Const("["), constraint.each(call_format), *_after_first(constraint), Const("]"))
        if constraint.forced
        else _calls_or_text(constraint),
    )


def _calls_or_text(constraint: CallConstraint) -> Format:
    calls = sequence(constraint.each(_first), *_after_first(constraint), Const("]"))
    names = "|".join(escaped(function.name) for function in constraint.functions)
    marker, space = escaped(START), r"[ \t\r\n]*"
    text = AnyText(rf"{space}{marker}|{space}\[{space}({names}){space}\(")
    if START not in constraint.template:
        return Alternatives((calls, text))
    after = _after_first(constraint)
    marked = sequence(Const(f"{START}["), constraint.each(call_format), *after, Const(f"]{END}"))
    return Alternatives((calls, marked, text))


def _first(function: Function) -> Format:
    head = Pattern(rf"[ \t\r\n]*\[{escaped(function.name)}\(")
    return sequence(head, Rule(function.name), Const(")"))


def _after_first(constraint: CallConstraint) -> tuple[Format, ...]:
    if constraint.once:
        return ()
    return (Repeat(sequence(Const(", "), constraint.each(call_format)), optional=True),)
