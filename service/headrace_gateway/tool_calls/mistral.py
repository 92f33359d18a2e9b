"""Mistral's two forms behind `[TOOL_CALLS]`: an array of objects, or `f{...}` for each call.

The newer tokenizers write `[TOOL_CALLS]f[ARGS]{...}`, with `[CALL_ID]...` before `[ARGS]` or not.
"""

import re

from ..parts import PartList
from .base import Body, MarkedParser
from .call_array import CallArray
from .call_object import Status
from .scanning import JsonValueScanner, skip_space

MARKER = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([\w.:/-]{1,128})\s*(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s*", re.ASCII)
_MAX_HEAD_CHARS = 256
_NAME_START = re.compile(r"\w", re.ASCII)


class MistralParser(MarkedParser):
    def __init__(self, parts: PartList) -> None:
        super().__init__(MARKER, parts)

    def new_body(self) -> Body:
        return _Body(self._parts)


class _Body:
    """Finds out by the first character which of the two forms it is."""

    def __init__(self, parts: PartList) -> None:
        self._parts = parts
        self._space = ""
        self._form: CallArray | _NamedCall | None = None

    @property
    def status(self) -> Status:
        return Status.OPEN if self._form is None else self._form.status

    @property
    def committed(self) -> bool:
        return self._form is not None and self._form.committed

    @property
    def raw(self) -> str:
        return self._space + ("" if self._form is None else self._form.raw)

    def push(self, text: str) -> str:
        if self._form is None:
            position = skip_space(text, 0)
            self._space += text[:position]
            text = text[position:]
            if not text:
                return ""
            named = _NAME_START.match(text) is not None
            self._form = _NamedCall(self._parts) if named else CallArray(self._parts)
        return self._form.push(text)


class _NamedCall:
    """`f{...}`, as a Body."""

    def __init__(self, parts: PartList) -> None:
        self.status = Status.OPEN
        self.committed = False
        self.raw = ""
        self._parts = parts
        self._scanner = JsonValueScanner("{")

    def push(self, text: str) -> str:
        if not self.committed:
            text = self._head(text)
        return self._arguments(text) if self.committed and text else text

    def _head(self, text: str) -> str:
        """Reads up to the arguments. The first brace decides."""
        at = text.find("{")
        end = len(text) if at < 0 else at
        self.raw += text[:end]
        if len(self.raw) > _MAX_HEAD_CHARS:
            cut = len(self.raw) - _MAX_HEAD_CHARS
            self.status, self.raw, end = Status.FAILED, self.raw[:-cut], end - cut
        elif at >= 0:
            self._begin()
        return text[end:]

    def _begin(self) -> None:
        found = _HEAD.fullmatch(self.raw)
        if found is None:
            self.status = Status.FAILED
            return
        self.committed, self.raw = True, ""
        self._parts.start(found[1])

    def _arguments(self, text: str) -> str:
        end, complete = self._scanner.scan(text, 0)
        self._parts.arguments(text[:end])
        if complete:
            self.status = Status.DONE
        return text[end:]
