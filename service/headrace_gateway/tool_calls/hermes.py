"""Hermes' and Qwen's form: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from ..parts import PartList
from .base import Body, MarkedParser
from .call_object import CallObject, Status
from .scanning import SPACE

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(MarkedParser):
    def __init__(self, parts: PartList) -> None:
        super().__init__(OPEN, parts)

    def new_body(self) -> Body:
        return _Body(self._parts)


class _Body:
    """The object and its closing marker, which models forget now and then."""

    def __init__(self, parts: PartList) -> None:
        self.status = Status.OPEN
        self._call = CallObject(parts)
        self._behind = ""

    @property
    def committed(self) -> bool:
        return self._call.committed

    @property
    def raw(self) -> str:
        return self._call.raw

    def push(self, text: str) -> str:
        if self._call.status is Status.DONE:
            return self._close(text)
        rest = self._call.push(text)
        if self._call.failed:
            self.status = Status.FAILED
        return rest

    def _close(self, text: str) -> str:
        self._behind += text
        marker = self._behind.lstrip(SPACE)
        if CLOSE.startswith(marker) and marker != CLOSE:
            return ""
        self.status = Status.DONE
        return marker[len(CLOSE) :] if marker.startswith(CLOSE) else self._behind
