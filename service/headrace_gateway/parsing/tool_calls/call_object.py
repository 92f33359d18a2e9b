"""One call as a JSON object, `{"name": "f", "arguments": {...}}`, read while it is written.

The call is certain (and its arguments are passed on as they come) once its name is known and its
arguments have begun. Before that, anything that does not fit makes it plain text.
"""

import json
from collections.abc import Callable, Collection
from enum import Enum

from ..parts import PartList
from .scanning import JsonValueScanner, skip_space

ARGUMENTS = ("arguments", "parameters")
# A text that may be a call is plain text if it is still uncertain after this many characters.
MAX_UNCERTAIN_CHARS = 65_536
_SCALARS = "-0123456789tfn"


class Status(Enum):
    OPEN = "open"
    DONE = "done"
    FAILED = "failed"


class CallObject:
    """Reads one object into `parts`. `known` are the allowed names; None allows any."""

    def __init__(self, parts: PartList, known: Collection[str] | None = None) -> None:
        self.status = Status.OPEN
        self.committed = False
        self.raw = ""  # all text so far, while it may still be plain text
        self._parts = parts
        self._known = known
        self._name: str | None = None
        self._arguments: str | None = None
        self._key = ""
        self._buffer = ""
        self._scanner: JsonValueScanner | None = None
        self._state: Callable[[str, int], int] = self._object

    @property
    def failed(self) -> bool:
        return self.status is Status.FAILED

    def push(self, text: str) -> str:
        """Reads on; returns what follows the object, or the text from where it stopped being
        one."""
        if self.committed:
            return self._read_on(text)
        allowed = MAX_UNCERTAIN_CHARS - len(self.raw)
        left, rest = self._read_on(text[:allowed]), text[allowed:]
        if self.status is not Status.OPEN:
            return left + rest
        if self.committed:
            return self._read_on(rest)
        if len(self.raw) >= MAX_UNCERTAIN_CHARS:
            self.status = Status.FAILED
        return rest

    def _read_on(self, text: str) -> str:
        position = 0
        while position < len(text) and self.status is Status.OPEN:
            if self._scanner is None:  # between two values
                position = skip_space(text, position)
            if position < len(text):
                position = self._state(text, position)
        if not self.committed:
            self.raw += text[:position]
        return text[position:]

    def _fail(self, position: int) -> int:
        self.status = Status.FAILED
        return position

    def _object(self, text: str, position: int) -> int:
        if text[position] != "{":
            return self._fail(position)
        self._state = self._before_key
        return position + 1

    def _before_key(self, text: str, position: int) -> int:
        if text[position] == "}":
            return self._end(position)
        if text[position] != '"':
            return self._fail(position)
        self._begin('"', self._in_key)
        return position

    def _in_key(self, text: str, position: int) -> int:
        end, complete = self._read(text, position)
        if complete:
            key = _decoded(self._buffer)
            if not isinstance(key, str):
                return self._fail(end)
            self._key, self._state = key, self._colon
        return end

    def _colon(self, text: str, position: int) -> int:
        if text[position] != ":":
            return self._fail(position)
        self._state = self._before_value
        return position + 1

    def _before_value(self, text: str, position: int) -> int:
        first = text[position]
        if not self._may_begin(first):
            return self._fail(position)
        if self._key in ARGUMENTS and first == "{" and self._name is not None:
            self._commit("")
            self._begin(first, self._in_arguments)
        else:
            self._begin(first, self._in_value)
        return position

    def _may_begin(self, first: str) -> bool:
        if self._key == "name" and not self.committed:
            return first == '"'
        if self._key in ARGUMENTS and not self.committed:
            return first in '{"n'
        return first in '{["' or first in _SCALARS

    def _in_arguments(self, text: str, position: int) -> int:
        end, complete = self._scan(text, position)
        self._parts.arguments(text[position:end])
        if complete:
            self._state = self._after_value
        return end

    def _in_value(self, text: str, position: int) -> int:
        end, complete = self._read(text, position)
        if complete:
            self._state = self._after_value
            if not self.committed and not self._take():
                return self._fail(end)
        return end

    def _take(self) -> bool:
        """Takes a complete value; returns False if it cannot be a call's."""
        if self._key == "name":
            self._name = _name(self._buffer, self._known)
        elif self._key in ARGUMENTS:
            self._arguments = _as_object(self._buffer)
            if self._arguments is None:
                return False
        else:
            return True
        if self._key == "name" and self._name is None:
            return False
        if self._name is not None and self._arguments is not None:
            self._commit(self._arguments)
        return True

    def _after_value(self, text: str, position: int) -> int:
        if text[position] == "}":
            return self._end(position)
        if text[position] != ",":
            return self._fail(position)
        self._state = self._before_key
        return position + 1

    def _end(self, position: int) -> int:
        if not self.committed and self._name is not None:
            self._commit("{}")
        if not self.committed:
            return self._fail(position)
        self.status = Status.DONE
        return position + 1

    def _commit(self, arguments: str) -> None:
        assert self._name is not None
        self.committed, self.raw = True, ""
        self._parts.start(self._name)
        self._parts.arguments(arguments)

    def _begin(self, first: str, state: Callable[[str, int], int]) -> None:
        self._scanner, self._buffer, self._state = JsonValueScanner(first), "", state

    def _scan(self, text: str, position: int) -> tuple[int, bool]:
        assert self._scanner is not None
        end, complete = self._scanner.scan(text, position)
        if complete:
            self._scanner = None
        return end, complete

    def _read(self, text: str, position: int) -> tuple[int, bool]:
        end, complete = self._scan(text, position)
        self._buffer += text[position:end]
        return end, complete


def _decoded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _name(text: str, known: Collection[str] | None) -> str | None:
    name = _decoded(text)
    if not isinstance(name, str) or not name or (known is not None and name not in known):
        return None
    return name


def _as_object(text: str) -> str | None:
    """Returns arguments as the text of an object; some models write them as a string, or as
    null."""
    if text.startswith("{"):
        return text
    value = _decoded(text)
    if value is None:
        return "{}" if text == "null" else None
    return value if isinstance(value, str) else None
