"""One call as Python writes it, `f(a=1, b="x")`: read, and as a text must match it."""

import ast
import json
import keyword
import re
from collections.abc import Mapping
from typing import Any

from headrace_common.structural_format import (
    Choice,
    Const,
    Format,
    Json,
    Listed,
    Pattern,
    Repeat,
    Rule,
    Tag,
)
from headrace_common.structured import StructuredOutputError

from .arguments import parameters
from .held import Function, Held, sequence
from .scanning import skip_space

MAX_CALL_CHARS = 2**17

_NAME = re.compile(r"[A-Za-z_][\w.]{0,127}\s*", re.ASCII)
_NAME_OR_LESS = re.compile(r"(?:[A-Za-z_][\w.]{0,127})?\s*", re.ASCII)
_STRUCTURE = re.compile(r"[\"'()\[\]{}]")
_CONSTANTS = {"true": True, "false": False, "null": None}


class CallEnd:
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


def parsed_call(text: str) -> tuple[str, str] | None:
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


def call_rules(held: Held) -> dict[str, Format]:
    """The functions' arguments by their names. Raises StructuredOutputError."""
    for function in held.functions:
        _check_name(function)
    return {function.name: _arguments(function) for function in held.functions}


def call_format(function: Function) -> Format:
    return Tag(f"{function.name}(", Rule(function.name), ")")


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
