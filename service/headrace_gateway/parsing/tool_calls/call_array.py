"""Calls as a JSON array of objects, read while they are written."""

from collections.abc import Collection

from ..parts import PartList
from .call_object import CallObject, Status
from .scanning import skip_space


class CallArray:
    """A Body that reads `[{...}, {...}]` from its bracket on; an empty array is not a call."""

    def __init__(self, parts: PartList, known: Collection[str] | None = None) -> None:
        self.status = Status.OPEN
        self.committed = False
        self.raw = ""
        self._parts = parts
        self._known = known
        self._opened = False
        self._call: CallObject | None = None

    def push(self, text: str) -> str:
        while text and self.status is Status.OPEN:
            text = self._between(text) if self._call is None else self._read(self._call, text)
        return text

    def _between(self, text: str) -> str:
        """Reads what precedes the first object, or separates two."""
        position = skip_space(text, 0)
        if position == len(text):
            return self._pass(text, position)
        if not self._opened and text[position] == "[":
            self._opened = True
            self._call = CallObject(self._parts, self._known)
            return self._pass(text, position + 1)
        if self.committed and text[position] == ",":
            self._call = CallObject(self._parts, self._known)
            return self._pass(text, position + 1)
        if self.committed and text[position] == "]":
            self.status = Status.DONE
            return self._pass(text, position + 1)
        self.status = Status.FAILED
        return self._pass(text, position)

    def _read(self, call: CallObject, text: str) -> str:
        before = call.raw
        rest = call.push(text)
        if call.committed:
            self.committed, self.raw = True, ""
        else:
            self.raw += call.raw[len(before) :]
        if call.status is Status.DONE:
            self._call = None
        elif call.status is Status.FAILED:
            self.status = Status.FAILED
        return rest

    def _pass(self, text: str, position: int) -> str:
        if not self.committed:
            self.raw += text[:position]
        return text[position:]
