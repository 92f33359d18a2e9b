"""Answers whose whole text a grammar constrains to calls: one tool's arguments, or an array."""

from collections.abc import Collection

from ..parts import Part, PartList
from .call_array import CallArray
from .call_object import Status


class NamedParser:
    """The whole text is the arguments of one tool."""

    def __init__(self, parts: PartList, name: str) -> None:
        self._parts = parts
        self._name = name

    def push(self, text: str) -> list[Part]:
        if not self._parts.calls:
            text = text.lstrip()
            if not text:
                return []
            self._parts.start(self._name)
        self._parts.arguments(text)
        return self._parts.take()

    def finish(self) -> list[Part]:
        return []


class RequiredParser:
    """The whole text is `[{"name": "f", "parameters": {...}}, ...]`."""

    def __init__(self, parts: PartList, known: Collection[str]) -> None:
        self._parts = parts
        self._array = CallArray(parts, known)
        self._after = ""

    def push(self, text: str) -> list[Part]:
        if self._array.status is Status.OPEN:
            text = self._array.push(text)
        if self._array.status is not Status.OPEN:
            self._after += text
        return self._parts.take()

    def finish(self) -> list[Part]:
        plain = self._array.raw + self._after
        if plain.strip():
            self._parts.text(plain)
        return self._parts.take()
