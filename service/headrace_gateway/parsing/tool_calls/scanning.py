"""Finds the ends of JSON values and markers in text that arrives in pieces.

Every result depends on the characters only, never on how the text is cut.
"""

import re
from collections.abc import Sequence

SPACE = " \t\r\n"
# Spaces before a marker that are held back, so that they can be removed with it.
MAX_HELD_SPACE = 64

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[,}\]\s]")


class JsonValueScanner:
    """Finds the end of one JSON value that begins with `first`. Does not check its content."""

    def __init__(self, first: str) -> None:
        self._scalar = first not in '{["'
        self._string = first == '"'
        self._begun = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def scan(self, text: str, position: int) -> tuple[int, bool]:
        """Returns the end of the value's text from `position` on, and whether it is complete
        there."""
        if self._scalar:
            found = _AFTER_SCALAR.search(text, position)
            return (len(text), False) if found is None else (found.start(), True)
        while position < len(text):
            position, complete = self._step(text, position)
            if complete:
                return position, True
        return position, False

    def _step(self, text: str, position: int) -> tuple[int, bool]:
        if self._escaped:
            self._escaped = False
            return position + 1, False
        found = (_IN_STRING if self._quoted else _STRUCTURE).search(text, position)
        if found is None:
            return len(text), False
        return found.end(), self._take(found[0])

    def _take(self, character: str) -> bool:
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = not self._quoted
            return self._string and not self._quoted
        else:
            self._depth += 1 if character in "{[" else -1
            return self._depth == 0
        return False


class MarkerSearch:
    """Looks for a marker in text; holds back its possible beginning, and the space before it.

    With `others` it looks for the first of several; `marker` is the one that was found last.
    """

    def __init__(self, marker: str, space: str = SPACE, others: Sequence[str] = ()) -> None:
        self.marker = marker
        self.buffered = ""
        self._markers = (marker, *others)
        self._space = space

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns text that can be shown, and the text after the marker (None: not found yet).

        When the marker is found, `buffered` is the space that was before it.
        """
        seen = self.buffered + text
        at, marker = self._first(seen)
        if at >= 0:
            shown = self._before_space(seen, at)
            self.buffered, self.marker = seen[shown:at], marker
            return seen[:shown], seen[at + len(marker) :]
        begun = max(beginning_length(seen, each) for each in self._markers)
        shown = self._before_space(seen, len(seen) - begun)
        self.buffered = seen[shown:]
        return seen[:shown], None

    def _first(self, text: str) -> tuple[int, str]:
        """Returns the position of the first marker, and which it is; -1 if there is none."""
        places = [(text.find(each), each) for each in self._markers]
        return min((place for place in places if place[0] >= 0), default=places[0])

    def flush(self) -> str:
        """Returns what is held back, and clears it."""
        buffered, self.buffered = self.buffered, ""
        return buffered

    def _before_space(self, text: str, end: int) -> int:
        least = max(0, end - MAX_HELD_SPACE)
        return least + len(text[least:end].rstrip(self._space))


def beginning_length(text: str, marker: str) -> int:
    """Returns the length of the longest end of `text` that only begins `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in SPACE:
        position += 1
    return position
