"""Reads one call as Python writes it, `f(a=1, b="x")`."""

import ast
import json
import re

from .json_words import is_json
from .scanning import skip_space

MAX_CALL_CHARS = 2**17

_NAME = re.compile(r"[A-Za-z_][\w.]{0,127}\s*", re.ASCII)
_NAME_OR_LESS = re.compile(r"(?:[A-Za-z_][\w.]{0,127})?\s*", re.ASCII)
_STRUCTURE = re.compile(r"[\"'()\[\]{}]")
_CONSTANTS = {"true": True, "false": False, "null": None}


class CallEnd:
    """Finds the end of the call that begins at `begin`. `unfit`: it has none."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self.unfit = False
        self._position = begin
        self._depth = 0
        self._named = False
        self._quote = ""

    def find(self, text: str) -> int | None:
        """Returns the position after its last parenthesis in `text`, which may have grown."""
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
    """Returns a call's name and its arguments as JSON; None if it is not a call with literals
    only."""
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
    """Finds where the nodes of a text's tree are written in it; nodes count lines and bytes."""

    def __init__(self, text: str) -> None:
        self._lines = text.encode().splitlines(keepends=True)

    def of(self, node: ast.expr) -> str | None:
        """Returns what was written, if it is in one line."""
        if node.end_lineno != node.lineno:
            return None
        return self._lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()


def _value(written: str | None, node: ast.expr) -> str:
    """Returns a value as JSON. JSON stays as it is; Python reads some of it differently."""
    if written is not None and is_json(written):
        return written
    value = ast.literal_eval(_Constants().visit(node))
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


class _Constants(ast.NodeTransformer):
    """Replaces JSON's names of constants by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
