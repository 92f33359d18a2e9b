"""The Pythonic form: the whole answer is a list of calls, `[f(a=1), g(b="x")]`.

Each call is passed on when it is complete, its arguments as JSON.
"""

import ast
import json
import re
from collections.abc import Collection

from ..parts import Part, PartList
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
        arguments = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            arguments[keyword.arg] = ast.literal_eval(_Constants().visit(keyword.value))
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _Constants(ast.NodeTransformer):
    """JSON's names for what Python calls otherwise."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
