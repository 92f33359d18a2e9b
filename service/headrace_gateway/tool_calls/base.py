"""What a parser of tool calls is, and the frame of those whose calls begin with a marker."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from ..parts import Part, PartList
from .call_object import Status
from .scanning import MarkerSearch


class ToolParser(Protocol):
    """Reads one choice's text. All parts together are the same however the text is cut."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """The text has ended: what was held back."""


class Body(Protocol):
    """What is behind a marker. Writes calls into its parts once they are certain.

    While `committed` is False, `raw` is all that was read of it.
    """

    @property
    def status(self) -> Status: ...
    @property
    def committed(self) -> bool: ...
    @property
    def raw(self) -> str: ...

    def push(self, text: str) -> str:
        """Reads on; returns what is no longer of it."""


class MarkedParser(ABC):
    """Text with calls in it, each behind a marker. What only looks like a call stays text.

    Space around calls goes with them. `others` are further markers.
    """

    def __init__(self, marker: str, parts: PartList, others: Sequence[str] = ()) -> None:
        self._parts = parts
        self._search = MarkerSearch(marker, others=others)
        self._body: Body | None = None

    @abstractmethod
    def new_body(self) -> Body:
        """Reads what is behind a marker that was found."""

    def push(self, text: str) -> list[Part]:
        rest: str | None = text
        while rest:
            rest = self._find(rest) if self._body is None else self._read(self._body, rest)
        return self._parts.take()

    def finish(self) -> list[Part]:
        if self._body is not None:
            self._leave(self._body)
        held = self._search.flush()
        if held.strip() or not self._parts.calls:
            self._parts.text(held)
        return self._parts.take()

    def _find(self, text: str) -> str | None:
        shown, behind = self._search.push(text)
        self._parts.text(shown)
        if behind is not None:
            self._body = self.new_body()
        return behind

    def _read(self, body: Body, text: str) -> str:
        rest = body.push(text)
        if body.status is not Status.OPEN:
            self._leave(body)
        return rest

    def _leave(self, body: Body) -> None:
        self._body = None
        space = self._search.flush()
        if not body.committed:
            self._parts.text(space + self._search.marker + body.raw)
