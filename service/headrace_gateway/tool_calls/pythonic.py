"""The Pythonic form: the whole answer is a list of calls, `[f(a=1), g(b="x")]`.

Each call is passed on when it is complete, its arguments as JSON.
"""

from collections.abc import Collection

from headrace_common.structural_format import (
    AnyText,
    Choice,
    Const,
    Format,
    Pattern,
    Repeat,
    Rule,
    Rules,
)
from headrace_common.structural_grammar import escaped

from ..parts import Part, PartList
from .held import Function, Held, sequence
from .python_call import MAX_CALL_CHARS, CallEnd, parsed_call
from .python_call_format import call_format, call_rules
from .scanning import skip_space

START, END = "<|python_start|>", "<|python_end|>"


class PythonicParser:
    def __init__(self, parts: PartList, known: Collection[str]) -> None:
        self._parts = parts
        self._known = known
        self._held = ""  # not shown, and not a call yet
        self._opened = False
        self._closed = False
        self._plain = False
        self._end = CallEnd()

    def push(self, text: str) -> list[Part]:
        if self._plain:
            self._parts.text(text)
            return self._parts.take()
        self._held += text
        while self._step():
            pass
        return self._parts.take()

    def finish(self) -> list[Part]:
        if self._held.strip() or not self._parts.calls:
            self._parts.text(self._held)
        self._held = ""
        return self._parts.take()

    def _step(self) -> bool:
        """Reads one thing of what is held; False where more of the text is needed."""
        if not self._opened:
            return self._open()
        return self._behind_list() if self._closed else self._call()

    def _open(self) -> bool:
        position = skip_space(self._held, 0)
        if self._held.startswith(START, position):
            position = skip_space(self._held, position + len(START))
        rest = self._held[position:]
        if not rest or START.startswith(rest):
            return False
        if rest[0] != "[":
            return self._give_up()
        self._opened = True
        self._end = CallEnd(position + 1)
        return True

    def _call(self) -> bool:
        begin = self._end.begin
        end = self._end.find(self._held)
        if self._end.unfit or (end or len(self._held)) - begin > MAX_CALL_CHARS:
            return self._give_up()
        if end is None:
            return False
        call = parsed_call(self._held[begin:end].strip())
        if call is None or call[0] not in self._known:
            return self._give_up()
        behind = skip_space(self._held, end)
        if behind == len(self._held):
            return False
        if self._held[behind] not in ",]":
            return self._give_up()
        self._parts.start(call[0])
        self._parts.arguments(call[1])
        self._closed = self._held[behind] == "]"
        self._held = self._held[behind + 1 :]
        self._end = CallEnd()
        return True

    def _behind_list(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(END):
            self._held = rest[len(END) :]
        elif END.startswith(rest):
            return False
        return self._give_up() if self._held.strip() else False

    def _give_up(self) -> bool:
        self._plain = True
        self._parts.text(self._held)
        self._held = ""
        return False


def pythonic_format(held: Held) -> Format:
    """The text is a list of calls; or text that begins no such list."""
    return Rules(
        call_rules(held),
        sequence(Const("["), held.each(call_format), *_behind_first(held), Const("]"))
        if held.forced
        else _calls_or_text(held),
    )


def _calls_or_text(held: Held) -> Format:
    calls = sequence(held.each(_first), *_behind_first(held), Const("]"))
    names = "|".join(escaped(function.name) for function in held.functions)
    marker, space = escaped(START), r"[ \t\r\n]*"
    text = AnyText(rf"{space}{marker}|{space}\[{space}({names}){space}\(")
    if START not in held.template:
        return Choice((calls, text))
    behind = _behind_first(held)
    marked = sequence(Const(f"{START}["), held.each(call_format), *behind, Const(f"]{END}"))
    return Choice((calls, marked, text))


def _first(function: Function) -> Format:
    head = Pattern(rf"[ \t\r\n]*\[{escaped(function.name)}\(")
    return sequence(head, Rule(function.name), Const(")"))


def _behind_first(held: Held) -> tuple[Format, ...]:
    if held.once:
        return ()
    return (Repeat(sequence(Const(", "), held.each(call_format)), optional=True),)
