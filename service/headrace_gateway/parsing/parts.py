"""The parts of a model's text: plain text, reasoning, and tool calls in pieces."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. Its arguments follow; calls are numbered from 0 within a choice."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments' JSON, as the model wrote it."""

    index: int
    text: str


Part = Text | Reasoning | CallStart | CallArguments


class PartList:
    """Collects parts in order, and joins neighbouring text.

    `limit`: the most calls; further ones are left out.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.calls = 0
        self._limit = limit
        self._parts: list[Part] = []

    def text(self, text: str) -> None:
        self._say(Text, text)

    def reasoning(self, text: str) -> None:
        self._say(Reasoning, text)

    def start(self, name: str) -> None:
        self.calls += 1
        if self._within_limit:
            self._parts.append(CallStart(self.calls - 1, name))

    def arguments(self, text: str) -> None:
        if not text or not self._within_limit:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, CallArguments) and last.index == self.calls - 1:
            self._parts[-1] = CallArguments(last.index, last.text + text)
        else:
            self._parts.append(CallArguments(self.calls - 1, text))

    def take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _say(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        if not text:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind):
            self._parts[-1] = kind(last.text + text)
        else:
            self._parts.append(kind(text))

    @property
    def _within_limit(self) -> bool:
        return self._limit is None or self.calls <= self._limit
