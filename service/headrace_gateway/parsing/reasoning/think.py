"""Separates reasoning from the answer: it stands between two markers, `<think>` and `</think>`.

Line breaks next to the markers are removed with them. The result is the same however the text is
cut.
"""

from collections.abc import Sequence
from enum import Enum

from ..parts import Part, Reasoning, Text
from ..tool_calls.scanning import SPACE, MarkerSearch


class Begin(Enum):
    """Where a text begins: in reasoning, after it, or wherever its own first words say."""

    INSIDE = "inside"
    CLOSED = "behind"
    OPEN = "open"


class ThinkParser:
    """Reads one text. `otherwise_inside`: a text without an opening marker is reasoning.

    `label`: a word after the opening marker that is removed with it.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        begin: Begin,
        *,
        otherwise_inside: bool,
        label: str = "",
    ) -> None:
        self.seen = begin is Begin.INSIDE
        self.over = begin is Begin.CLOSED
        self._opening = opening
        self._otherwise_inside = otherwise_inside
        self._search = MarkerSearch(closing, "\n")
        self._start: str | None = None if begin is Begin.CLOSED else ""
        self._begin = begin
        self._fresh = False  # only line breaks have come since the last marker
        self._label = label  # until the start is known
        self._labelled = ""

    def push(self, text: str) -> list[Part]:
        if self._start is not None:
            text = self._find_start(self._start + text)
        if not text:
            return []
        return self._reasoning(text) if not self.over else self._answer(text)

    def finish(self) -> list[Part]:
        if self._start is not None:
            start, self._start = self._start, None
            return [] if self._begin is Begin.INSIDE else self._text(start)
        buffered = self._labelled + self._search.flush()
        return [Reasoning(buffered)] if buffered and not self.over else []

    def _text(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def _find_start(self, seen: str) -> str:
        """Returns the text after the start once that is known; "" before."""
        rest = seen.lstrip(SPACE)
        if rest.startswith(self._opening):
            return self._started(rest[len(self._opening) :], inside=True)
        if self._opening.startswith(rest):
            self._start = seen
            return ""
        inside = self._otherwise_inside or self._begin is Begin.INSIDE
        return self._started(seen, inside=inside)

    def _started(self, text: str, *, inside: bool) -> str:
        self._start = None
        self.seen, self.over = inside, not inside
        self._fresh = inside
        return text

    def _without_label(self, text: str) -> str:
        seen = self._labelled + text
        if self._label.startswith(seen) and seen != self._label:
            self._labelled = seen
            return ""
        label, self._label, self._labelled = self._label, "", ""
        return seen.removeprefix(label)

    def _reasoning(self, text: str) -> list[Part]:
        if self._label:
            text = self._without_label(text)
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        shown, after = self._search.push(text)
        parts: list[Part] = [Reasoning(shown)] if shown else []
        if after is not None:
            self._search.flush()
            self.over = self._fresh = True
            parts += self._answer(after)
        return parts

    def _answer(self, text: str) -> list[Part]:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return self._text(text)


class ThinkTokens:
    """Counts the tokens of reasoning, with the closing marker."""

    def __init__(self, parser: ThinkParser, closing: int | None) -> None:
        self._parser = parser
        self._closing = closing
        self._count = 0
        self._closed = False

    @property
    def total(self) -> int:
        return self._count if self._parser.seen else 0

    def push(self, token_ids: Sequence[int]) -> None:
        """Counts tokens. Call it before the parser reads their text."""
        for token_id in () if self._parser.over else token_ids:
            self._count += not self._closed
            self._closed = self._closed or token_id == self._closing
