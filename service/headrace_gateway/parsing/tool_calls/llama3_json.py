"""Llama 3's format: the whole answer is `{"name": "f", "parameters": {...}}`, or several of them.

A `;` may separate two. Without `<|python_tag|>` before it, only an object that names a known tool
is a call.
"""

from collections.abc import Collection

from headrace_common.structured.structural_format import (
    Alternatives,
    AnyText,
    Const,
    Format,
    Json,
    Pattern,
    Repeat,
    Rule,
    Rules,
    Tag,
)

from ..parts import Part, PartList
from .call_object import CallObject, Status
from .constraint import CallConstraint, Function, sequence
from .scanning import skip_space

TAG = "<|python_tag|>"
SEPARATOR = ";"


class Llama3JsonParser:
    def __init__(self, parts: PartList, known: Collection[str]) -> None:
        self._parts = parts
        self._known = known
        self._buffer = ""  # not shown yet, and not known to be a call
        self._tagged = False
        self._call: CallObject | None = None
        self._plain = False

    def push(self, text: str) -> list[Part]:
        while text:
            if self._plain:
                self._parts.text(text)
                break
            text = self._between(text) if self._call is None else self._read(self._call, text)
        return self._parts.take()

    def finish(self) -> list[Part]:
        if self._call is not None and not self._call.committed:
            self._buffer += self._call.raw
        if self._buffer.strip() or not self._parts.calls:
            self._parts.text(self._buffer)
        self._buffer = ""
        return self._parts.take()

    def _between(self, text: str) -> str:
        """Reads where a call may begin: at the start, and after a separator."""
        seen = self._buffer + text
        position = skip_space(seen, 0)
        rest = seen[position:]
        first = not self._parts.calls
        if first and rest.startswith(TAG):
            self._tagged = True
            position = skip_space(seen, position + len(TAG))
        elif not first and rest.startswith(SEPARATOR):
            position = skip_space(seen, position + len(SEPARATOR))
        elif not first and rest and not rest.startswith("{"):
            return self._give_up(seen)
        if position == len(seen) or (first and TAG.startswith(rest)):
            self._buffer = seen
            return ""
        if seen[position] != "{":
            return self._give_up(seen)
        self._buffer = seen[:position]
        self._call = CallObject(self._parts, None if self._tagged else self._known)
        return seen[position:]

    def _read(self, call: CallObject, text: str) -> str:
        rest = call.push(text)
        if call.committed:
            self._buffer = ""
        if call.status is Status.FAILED:
            return self._give_up(self._buffer + call.raw + rest)
        if call.status is Status.DONE:
            self._call = None
        return rest

    def _give_up(self, text: str) -> str:
        self._plain, self._buffer, self._call = True, "", None
        return text


_SPACE = r"[ \t\r\n]*"
_BRACE = Pattern(rf"{_SPACE}\{{{_SPACE}")
_TYPE = '"type": "function", '


def llama3_json_format(constraint: CallConstraint) -> Format:
    """Returns the format: calls, or text, or an object without a name, with text after it or
    not."""

    def call(function: Function) -> Format:
        begin = f'"name": {function.quoted}, "parameters": '
        return Tag(begin, Rule(function.name), "}")

    one = constraint.each(call)
    further_calls: tuple[Format, ...] = ()
    if not constraint.once:
        again = Alternatives((one, sequence(Const(_TYPE), one)))
        further_calls = (Repeat(sequence(Pattern(r"(; ?|\n)?\{"), again), optional=True),)
    rules = {function.name: function.arguments for function in constraint.functions}
    if constraint.forced:
        return Rules(rules, sequence(Const("{"), one, *further_calls))
    calls = sequence(one, *further_calls)
    return Rules(
        rules,
        Alternatives(
            (
                sequence(_BRACE, Alternatives((calls, _typed(calls), _free(_key("name", "type"))))),
                sequence(Const(TAG), _BRACE, Alternatives((calls, sequence(Const(_TYPE), calls)))),
                AnyText(rf'{_SPACE}\{{{_SPACE}"|{_SPACE}<\|python_tag\|>'),
            )
        ),
    )


def _typed(calls: Format) -> Format:
    """Returns the format of an object that begins with its type: a call in some models, or none."""
    return Tag('"type": ', Alternatives((sequence(Const('"function", '), calls), _free_value())))


def _free(key: Pattern) -> Format:
    """Returns the format of a pair in an object that is not a call, and of all after it."""
    return sequence(key, Pattern(rf"{_SPACE}:{_SPACE}"), _free_value())


def _free_value() -> Format:
    others = Repeat(
        sequence(
            Pattern(rf"{_SPACE},{_SPACE}"), _key("name"), Pattern(rf"{_SPACE}:{_SPACE}"), Json({})
        ),
        optional=True,
    )
    return sequence(Json({}), others, Pattern(rf"{_SPACE}\}}"), AnyText())


def _key(*but: str) -> Pattern:
    """Returns the format of any string without escapes but these."""
    return Pattern(f'"({_unlike(but)})"')


def _unlike(words: Collection[str]) -> str:
    heads = sorted({word[0] for word in words if word})
    ways = [rf'[^{"".join(heads)}"\\][^"\\]*']
    if "" not in words:
        ways.append("")
    for head in heads:
        tails = [word[1:] for word in words if word[:1] == head]
        ways.append(f"{head}({_unlike(tails)})")
    return "|".join(ways)
