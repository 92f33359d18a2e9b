"""Gemma 4's format: `<|tool_call>call:f{city:<|"|>Rome<|"|>,days:2}<tool_call|>`.

Keys are bare words and texts stand between quotes of their own, unescaped; the rest is as in JSON.
The arguments are passed on as JSON while they are written.
"""

import re
from collections.abc import Callable

from ..parts import PartList
from .base import Body, BufferedBody
from .call_object import Status
from .closed import ClosedBody
from .json_words import as_json, quoted
from .named_call import MAX_HEAD_CHARS, NAME, NamedCall
from .scanning import SPACE, beginning_length

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEAD = re.compile(rf"\s*call:({NAME})\s*", re.ASCII)
_WORD_END = re.compile(r"[,}\]]")
_NULLS = ("none", "nil")
_CLOSERS = {"{": "}", "[": "]"}


def gemma4_body(parts: PartList) -> Body:
    return ClosedBody(_Call(parts), CLOSE)


class _Call(NamedCall):
    def __init__(self, parts: PartList) -> None:
        super().__init__(parts, _HEAD)
        self._values = _Values(parts)

    def _arguments(self, text: str) -> str:
        rest = self._values.push(text)
        self.status = self._values.status
        return rest


class _Values(BufferedBody):
    """Writes an object as JSON, from its brace on. Anything that does not fit ends it."""

    def __init__(self, parts: PartList) -> None:
        super().__init__(parts)
        self._open: list[str] = []
        self._first = True  # the state of what is open
        self._comma = False  # before the next key or value
        self._state: Callable[[], bool] = self._value
        self._after_text: Callable[[], bool] = self._behind

    def _step(self) -> bool:
        return self._state()

    def _next(self) -> str:
        """Returns the next character that is not a space, or nothing."""
        self._buffer = self._buffer.lstrip(SPACE)
        return self._buffer[:1]

    def _write(self, json_text: str) -> None:
        self._parts.arguments(f", {json_text}" if self._comma else json_text)
        self._first = self._comma = False

    def _key(self) -> bool:
        first = self._next()
        if first in ("}", ","):
            return self._behind()
        if QUOTE.startswith(self._buffer[: len(QUOTE)]):
            return self._quoted(self._colon)
        at = self._buffer.find(":")
        if at < 0:
            return len(self._buffer) > MAX_HEAD_CHARS and self._give_up()
        self._write(f"{quoted(self._buffer[:at].strip())}: ")
        self._buffer, self._state = self._buffer[at + 1 :], self._value
        return True

    def _colon(self) -> bool:
        first = self._next()
        if not first or first != ":":
            return bool(first) and self._give_up()
        self._parts.arguments(": ")
        self._buffer, self._state = self._buffer[1:], self._value
        return True

    def _value(self) -> bool:
        first = self._next()
        if first in _CLOSERS:
            self._write(first)
            self._open.append(first)
            self._first, self._buffer = True, self._buffer[1:]
            self._state = self._key if first == "{" else self._value
            return True
        if first in ("]", "}", ","):
            return self._missing()
        if QUOTE.startswith(self._buffer[: len(QUOTE)]):
            return self._quoted(self._behind)
        return self._word()

    def _missing(self) -> bool:
        """Handles a missing value: after a key, it is an empty text."""
        self._parts.arguments('""' if self._open[-1] == "{" else "")
        return self._behind()

    def _word(self) -> bool:
        """Reads a number, or one of JSON's words; it is known when it has ended."""
        end = _WORD_END.search(self._buffer)
        if end is None:
            return False
        word = self._buffer[: end.start()].strip()
        self._write("null" if word in _NULLS else as_json(word))
        self._buffer, self._state = self._buffer[end.start() :], self._behind
        return True

    def _quoted(self, after: Callable[[], bool]) -> bool:
        if len(self._buffer) < len(QUOTE):
            return False
        self._write('"')
        self._buffer = self._buffer[len(QUOTE) :]
        self._state, self._after_text = self._text, after
        return True

    def _text(self) -> bool:
        at = self._buffer.find(QUOTE)
        shown = len(self._buffer) - beginning_length(self._buffer, QUOTE) if at < 0 else at
        self._parts.arguments(quoted(self._buffer[:shown])[1:-1])
        self._buffer = self._buffer[shown:]
        if at < 0:
            return False
        self._parts.arguments('"')
        self._buffer, self._state = self._buffer[len(QUOTE) :], self._after_text
        return True

    def _behind(self) -> bool:
        """Reads what follows a value, or stands where one is missing."""
        first = self._next()
        if first == ",":
            self._comma = not self._first
            self._state = self._key if self._open[-1] == "{" else self._value
        elif first == _CLOSERS[self._open[-1]]:
            self._close()
        else:
            return bool(first) and self._give_up()
        self._buffer = self._buffer[1:]
        return True

    def _close(self) -> None:
        self._first = self._comma = False
        self._parts.arguments(_CLOSERS[self._open.pop()])
        self._state = self._behind
        if not self._open:
            self.status = Status.DONE

    def _give_up(self) -> bool:
        while self._open:
            self._close()
        return False
