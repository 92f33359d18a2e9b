"""A Body with a closing marker after it, which models sometimes forget."""

from .base import Body
from .call_object import Status
from .scanning import SPACE


class ClosedBody:
    """A Body: the inner one, then space and the marker."""

    def __init__(self, inner: Body, closing: str) -> None:
        self.status = Status.OPEN
        self._inner = inner
        self._closing = closing
        self._after_inner = ""
        self._closing_awaited = False

    @property
    def committed(self) -> bool:
        return self._inner.committed

    @property
    def raw(self) -> str:
        return self._inner.raw

    def push(self, text: str) -> str:
        if self._closing_awaited:
            return self._close(text)
        rest = self._inner.push(text)
        inner = self._inner.status
        self._closing_awaited = inner is Status.DONE
        if inner is Status.FAILED:
            self.status = Status.FAILED
        return self._close(rest) if self._closing_awaited and rest else rest

    def _close(self, text: str) -> str:
        self._after_inner += text
        marker = self._after_inner.lstrip(SPACE)
        if self._closing.startswith(marker) and marker != self._closing:
            return ""
        self.status = Status.DONE
        found = marker.startswith(self._closing)
        return marker[len(self._closing) :] if found else self._after_inner
