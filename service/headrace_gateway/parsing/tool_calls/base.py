"""The interface of parsers of tool calls, and a base for those whose calls begin with a marker."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from ..parts import Part, PartList
from .call_object import Status
from .scanning import MarkerSearch


class ToolParser(Protocol):
    """Reads one choice's text. The parts are the same however the text is cut."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """Returns the parts that were held back. Call it once, at the end."""


class Body(Protocol):
    """Reads what follows a marker. Writes calls into its parts once they are certain.

    While `committed` is False, `raw` is all that was read.
    """

    @property
    def status(self) -> Status: ...
    @property
    def committed(self) -> bool: ...
    @property
    def raw(self) -> str: ...

    def push(self, text: str) -> str:
        """Reads on; returns the text after its end."""


class BufferedBody(ABC):
    """A Body that buffers its text until a step can read it."""

    def __init__(self, parts: PartList) -> None:
        self.status = Status.OPEN
        self.committed = False
        self._parts = parts
        self._buffer = ""

    @property
    def raw(self) -> str:
        return "" if self.committed else self._buffer

    @abstractmethod
    def _step(self) -> bool:
        """Reads one element of the buffered text; returns False if it needs more text, or at the
        end."""

    def push(self, text: str) -> str:
        self._buffer += text
        while self.status is Status.OPEN and self._step():
            pass
        if self.status is Status.OPEN:
            return ""
        rest, self._buffer = self._buffer, ""
        return rest


class MarkedParser:
    """Text with calls in it, each after a marker. What only looks like a call stays text.

    Space around calls is removed with them. `others` are further markers. `body` makes what reads
    on after the marker that it is given.
    """

    def __init__(
        self,
        marker: str,
        body: Callable[[PartList, str], Body],
        parts: PartList,
        others: Sequence[str] = (),
    ) -> None:
        self._parts = parts
        self._search = MarkerSearch(marker, others=others)
        self._new_body = body
        self._body: Body | None = None

    def push(self, text: str) -> list[Part]:
        rest: str | None = text
        while rest:
            rest = self._find(rest) if self._body is None else self._read(self._body, rest)
        return self._parts.take()

    def finish(self) -> list[Part]:
        if self._body is not None:
            self._leave(self._body)
        buffered = self._search.flush()
        if buffered.strip() or not self._parts.calls:
            self._parts.text(buffered)
        return self._parts.take()

    def _find(self, text: str) -> str | None:
        shown, after = self._search.push(text)
        self._parts.text(shown)
        if after is not None:
            self._body = self._new_body(self._parts, self._search.marker)
        return after

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
