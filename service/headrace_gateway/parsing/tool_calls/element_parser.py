"""Reads calls whose arguments are elements, and writes them as JSON.

Values that are texts are passed on while the model writes them, other values once they are
complete. A value whose schema does not say `string` is read as JSON or as a Python literal, and as
a text if it is neither.
"""

from collections.abc import Callable, Mapping

from ..parts import PartList
from .arguments import ValueKind
from .base import BufferedBody
from .call_object import Status
from .elements import Elements
from .json_words import as_json, quoted
from .named_call import MAX_HEAD_CHARS
from .scanning import SPACE, beginning_length

Kinds = Mapping[str, Mapping[str, str]]


class ElementBody(BufferedBody):
    """A Body after `marker`. `known` maps each function to the kinds of its parameters."""

    def __init__(self, parts: PartList, form: Elements, known: Kinds, marker: str) -> None:
        super().__init__(parts)
        self._form = form
        self._known = known
        self._kinds: Mapping[str, str] = {}
        # the part of the head that was read before
        self._read_of_head = marker if marker == form.bare else ""
        self._argument_count = 0  # of this call
        self._state: Callable[[], bool] = self._head
        self._kind: str = ValueKind.JSON
        self._search = _MarkerSearch("")

    def _step(self) -> bool:
        return self._state()

    def _head(self) -> bool:
        """Reads the name, up to the first character that ends it."""
        at = self._buffer.find(self._form.head_end)
        if at < 0 and len(self._buffer) <= MAX_HEAD_CHARS:
            return False
        found = None
        if 0 <= at <= MAX_HEAD_CHARS:
            found = self._form.head.fullmatch(self._read_of_head + self._buffer[: at + 1])
        if found is None or (self._form.only_known and found[1] not in self._known):
            self.status = Status.DONE if self.committed else Status.FAILED
            return False
        kept = self._form.head_end == "<"
        self._buffer = self._buffer[at if kept else at + 1 :]
        self.committed, self._argument_count = True, 0
        self._kinds = self._known.get(found[1], {})
        self._parts.start(found[1])
        self._state = self._before_parameter
        return True

    def _before_parameter(self) -> bool:
        """Reads what precedes a parameter, or the call's end."""
        seen = self._buffer.lstrip(SPACE)
        form = self._form
        if seen.startswith(form.key_opening):
            return self._key(seen)
        if seen.startswith(form.closing):
            self._close(seen[len(form.closing) :], Status.DONE)
        elif end := next(filter(seen.startswith, form.ends), None):
            self._close(seen[len(end) :], Status.OPEN)
            self._state = self._after_call
        elif any(each.startswith(seen) for each in (form.key_opening, form.closing, *form.ends)):
            return False
        else:
            self._close(self._buffer, Status.DONE)
        return self.status is Status.OPEN

    def _close(self, rest: str, status: Status) -> None:
        self._parts.arguments("}" if self._argument_count else "{}")
        self._buffer, self.status = rest, status

    def _after_call(self) -> bool:
        """Reads what follows a call: the block's end, or another call."""
        seen = self._buffer.lstrip(SPACE)
        if not seen or (self._form.closing.startswith(seen) and seen != self._form.closing):
            return False
        if seen.startswith(self._form.closing):
            self._buffer, self.status = seen[len(self._form.closing) :], Status.DONE
        elif self._form.several and seen.startswith("<"):
            self._state = self._head
        else:
            self.status = Status.DONE
        return self.status is Status.OPEN

    def _key(self, seen: str) -> bool:
        found = self._form.key.match(seen)
        if found is None:
            if len(seen) > 2 * MAX_HEAD_CHARS:
                self._close(self._buffer, Status.DONE)
            return False
        self._buffer = seen[found.end() :]
        self._kind = self._kinds.get(found[1], ValueKind.JSON)
        if marked := found.groupdict().get("string"):
            self._kind = ValueKind.TEXT if marked == "true" else ValueKind.JSON
        prefix = ", " if self._argument_count else "{"
        self._argument_count += 1
        self._parts.arguments(f"{prefix}{quoted(found[1])}: ")
        self._state = self._value_padding
        return True

    def _value_padding(self) -> bool:
        """Reads the value's first characters: a line break that is not part of it."""
        if not self._buffer:
            return False
        pad = self._form.pad
        if pad and self._buffer.startswith(pad):
            self._buffer = self._buffer[len(pad) :]
        if self._kind == ValueKind.TEXT:
            self._parts.arguments('"')
            self._state = self._text
        else:
            self._state = self._value_start
        return True

    def _value_start(self) -> bool:
        first = self._buffer.lstrip(SPACE)[:1]
        if first:
            self._search = _MarkerSearch(first if self._kind == ValueKind.JSON else "")
            self._state = self._value
        return bool(first)

    def _text(self) -> bool:
        """Passes on the characters that certainly belong to the text."""
        at = self._buffer.find(self._form.value_end)
        if at < 0:
            shown = len(self._buffer) - beginning_length(self._buffer, self._form.value_end)
            if self._form.pad and self._buffer[:shown].endswith(self._form.pad):
                shown -= len(self._form.pad)
            self._pass_on(shown)
            return False
        end = at
        if self._form.pad and self._buffer[:at].endswith(self._form.pad):
            end -= len(self._form.pad)
        rest = self._buffer[at + len(self._form.value_end) :]
        self._pass_on(end)
        self._parts.arguments('"')
        self._buffer, self._state = rest, self._before_parameter
        return True

    def _pass_on(self, end: int) -> None:
        self._parts.arguments(quoted(self._buffer[:end])[1:-1])
        self._buffer = self._buffer[end:]

    def _value(self) -> bool:
        """Reads a value that is not a text, up to its end marker outside of JSON strings."""
        marker = self._form.value_end
        at = self._search.find(self._buffer, marker)
        if at is None:
            return False
        text = self._buffer[:at]
        if self._form.pad and text.endswith(self._form.pad):
            text = text[: -len(self._form.pad)]
        self._parts.arguments(_as_json_value(text, self._kind))
        self._buffer, self._state = self._buffer[at + len(marker) :], self._before_parameter
        return True


class _MarkerSearch:
    """Finds a marker outside of JSON strings, in a text that grows."""

    def __init__(self, first: str) -> None:
        self._aware = first in ("{", "[", '"')
        self._position = 0
        self._quoted = False
        self._escaped = False

    def find(self, text: str, marker: str) -> int | None:
        while True:
            at = text.find(marker, self._position)
            self._pass(text, len(text) - len(marker) + 1 if at < 0 else at)
            if at < 0:
                return None
            if not self._quoted:
                return at
            self._pass(text, at + 1)

    def _pass(self, text: str, end: int) -> None:
        if end <= self._position:
            return
        for character in text[self._position : end] if self._aware else "":
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = self._quoted
            elif character == '"':
                self._quoted = not self._quoted
        self._position = end


def _as_json_value(text: str, kind: str) -> str:
    if kind == ValueKind.NULLABLE_TEXT:
        return "null" if text.strip() in ("null", "None") else quoted(text)
    return as_json(text)
