"""The Pythonic form: the whole answer is a list of calls, `[f(a=1), g(b="x")]`.

Each call is passed on when it is complete, its arguments as JSON.
"""

import ast
import json
import keyword
import re
from collections.abc import Collection, Mapping
from typing import Any

from headrace_common.structural_format import (
    AnyText,
    Choice,
    Const,
    Format,
    Json,
    Listed,
    Pattern,
    Repeat,
    Rule,
    Rules,
    Tag,
)
from headrace_common.structural_grammar import escaped
from headrace_common.structured import StructuredOutputError

from ..parts import Part, PartList
from .arguments import parameters
from .held import Function, Held, sequence
from .scanning import skip_space

START, END = "<|python_start|>", "<|python_end|>"
MAX_CALL_CHARS = 2**17

_NAME = re.compile(r"[A-Za-z_][\w.]{0,127}\s*", re.ASCII)
_NAME_OR_LESS = re.compile(r"(?:[A-Za-z_][\w.]{0,127})?\s*", re.ASCII)
_STRUCTURE = re.compile(r"[\"'()\[\]{}]")
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser:
    def __init__(self, parts: PartList, known: Collection[str]) -> None:
        self._parts = parts
        self._known = known
        self._held = ""  # not shown, and not a call yet
        self._opened = False
        self._closed = False
        self._plain = False
        self._end = _CallEnd()

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
        self._end = _CallEnd(position + 1)
        return True

    def _call(self) -> bool:
        begin = self._end.begin
        end = self._end.find(self._held)
        if self._end.unfit or (end or len(self._held)) - begin > MAX_CALL_CHARS:
            return self._give_up()
        if end is None:
            return False
        call = _parsed(self._held[begin:end].strip())
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
        self._end = _CallEnd()
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


class _CallEnd:
    """Finds the end of the call that begins at `begin`. `unfit`: there is none."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self.unfit = False
        self._position = begin
        self._depth = 0
        self._named = False
        self._quote = ""

    def find(self, text: str) -> int | None:
        """The position behind its last parenthesis in `text`, of which more may have come."""
        if not self._named and not self._find_name(text):
            return None
        while self._position < len(text):
            if self._quote:
                if not self._skip_string(text):
                    return None
                continue
            found = _STRUCTURE.search(text, self._position)
            self._position = len(text) if found is None else found.end()
            if found is not None and self._take(found[0]):
                self._position = found.start()  # the same answer when asked again
                self._depth = 1
                return found.end()
        return None

    def _find_name(self, text: str) -> bool:
        start = skip_space(text, self.begin)
        name = _NAME_OR_LESS.match(text, start)
        assert name is not None
        if name.end() == len(text):
            return False
        self.unfit = _NAME.fullmatch(name[0]) is None or text[name.end()] != "("
        self._named, self._position = not self.unfit, name.end()
        return self._named

    def _take(self, character: str) -> bool:
        if character in "\"'":
            self._quote = character
            return False
        self._depth += 1 if character in "([{" else -1
        return self._depth == 0

    def _skip_string(self, text: str) -> bool:
        while self._position < len(text):
            character = text[self._position]
            if character == "\\":
                if self._position + 1 == len(text):
                    return False
                self._position += 1
            self._position += 1
            if character == self._quote:
                self._quote = ""
                return True
        return False


def _parsed(text: str) -> tuple[str, str] | None:
    """A call's name and its arguments as JSON; None where it is none, or not of literals alone."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        source = _Source(text)
        arguments = {}
        for each in call.keywords:
            if each.arg is None:
                return None
            arguments[each.arg] = _value(source.of(each.value), each.value)
        written = (f"{json.dumps(name)}: {value}" for name, value in arguments.items())
        return ast.unparse(call.func), f"{{{', '.join(written)}}}"
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _Source:
    """Where the nodes of a text's tree are written in it; they count lines and bytes."""

    def __init__(self, text: str) -> None:
        self._lines = text.encode().splitlines(keepends=True)

    def of(self, node: ast.expr) -> str | None:
        """What was written, where it is in one line."""
        if node.end_lineno != node.lineno:
            return None
        return self._lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()


def _value(written: str | None, node: ast.expr) -> str:
    """As JSON. What is JSON already stays as it is; Python reads some of it differently."""
    if written is not None:
        try:
            json.loads(written, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
        else:
            return written
    value = ast.literal_eval(_Constants().visit(node))
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


class _Constants(ast.NodeTransformer):
    """JSON's names for what Python calls otherwise."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def pythonic_format(held: Held) -> Format:
    """The text is a list of calls; or text that begins no such list."""
    for function in held.functions:
        _check_name(function)
    return Rules(
        {function.name: _arguments(function) for function in held.functions},
        sequence(Const("["), held.each(_call), *_behind_first(held), Const("]"))
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
    marked = sequence(Const(f"{START}["), held.each(_call), *behind, Const(f"]{END}"))
    return Choice((calls, marked, text))


def _first(function: Function) -> Format:
    head = Pattern(rf"[ \t\r\n]*\[{escaped(function.name)}\(")
    return sequence(head, Rule(function.name), Const(")"))


def _call(function: Function) -> Format:
    return Tag(f"{function.name}(", Rule(function.name), ")")


def _behind_first(held: Held) -> tuple[Format, ...]:
    if held.once:
        return ()
    return (Repeat(sequence(Const(", "), held.each(_call)), optional=True),)


def _arguments(function: Function) -> Format:
    if function.schema is None:
        pair = sequence(Pattern(r"[a-z]\w{0,63}="), Json({}))
        return Repeat(pair, Const(", "), optional=True)
    found = parameters(function.name, function.schema)
    for parameter in found:
        if not _is_name(parameter.name):
            raise StructuredOutputError(
                "json",
                f"parameter {parameter.name!r:.80} of {function.name} is no name in Python, as "
                "calls of this model are written: rename it, or leave strict out",
            )
    if not found:
        return sequence()
    return Listed(
        tuple(Tag(f"{each.name}=", _python(each.schema)) for each in found),
        tuple(number for number, each in enumerate(found) if each.required),
        ", ",
    )


def _python(schema: Mapping[str, Any]) -> Format:
    """A value as JSON, which the parser reads too; the plain words as in Python."""
    match schema.get("type"):
        case "boolean" if "enum" not in schema and "const" not in schema:
            return Choice((Const("True"), Const("False")))
        case "null":
            return Const("None")
        case [*types] if "null" in types and len(types) > 1 and "enum" not in schema:
            others = [each for each in types if each != "null"]
            return Choice((Json({**schema, "type": others}), Const("None")))
        case _:
            return Json(schema)


def _check_name(function: Function) -> None:
    if not all(map(_is_name, function.name.split("."))):
        raise StructuredOutputError(
            "json",
            f"{function.name!r} is no name in Python, as calls of this model are written: rename "
            "it, or leave strict out",
        )


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)
