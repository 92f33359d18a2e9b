"""A call whose name stands before its arguments: `f{...}`, with or without marks between."""

import re

from ..parts import PartList
from .call_object import Status
from .scanning import JsonValueScanner

MAX_HEAD_CHARS = 256
NAME = r"[\w.:/-]{1,128}"


class NamedCall:
    """A Body. `head` matches all that precedes the arguments' brace; its first group is the
    name."""

    def __init__(self, parts: PartList, head: re.Pattern[str]) -> None:
        self.status = Status.OPEN
        self.committed = False
        self.raw = ""
        self._parts = parts
        self._head = head
        self._scanner = JsonValueScanner("{")

    def push(self, text: str) -> str:
        if not self.committed:
            text = self._find_arguments(text)
        return self._arguments(text) if self.committed and text else text

    def _find_arguments(self, text: str) -> str:
        """Reads up to the arguments, which begin with the first brace."""
        at = text.find("{")
        end = len(text) if at < 0 else at
        self.raw += text[:end]
        if len(self.raw) > MAX_HEAD_CHARS:
            cut = len(self.raw) - MAX_HEAD_CHARS
            self.status, self.raw, end = Status.FAILED, self.raw[:-cut], end - cut
        elif at >= 0:
            self._begin()
        return text[end:]

    def _begin(self) -> None:
        found = self._head.fullmatch(self.raw)
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
