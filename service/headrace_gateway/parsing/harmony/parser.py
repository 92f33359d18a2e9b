"""Reads Harmony: each message is reasoning, text for the user, or a call, as its header says.

Text without a header is text. The result is the same however the text is cut.
"""

from collections.abc import Callable, Collection

from ..parts import Part, PartList
from ..tool_calls.scanning import SPACE, JsonValueScanner, MarkerSearch, skip_space
from .header import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MAX_HEADER_CHARS,
    MESSAGE,
    RETURN,
    START,
    Begin,
    Header,
    Purpose,
)

# Inserted between two messages of the same purpose.
_SEPARATOR = "\n\n"
# The texts with which a header can begin: the first one, whose author is in the prompt, and later
# ones.
_FIRST_OPENINGS = (CHANNEL, START, MESSAGE, CONSTRAIN, "to=")
_NEXT_OPENINGS = (START, CHANNEL)


class HarmonyParser:
    """Reads one choice's text. `known` are the functions that may be called; None if there are
    none."""

    def __init__(
        self, parts: PartList, known: Collection[str] | None, begin: Begin | None = None
    ) -> None:
        begin = begin or Begin()
        self._parts = parts
        self._known = known
        self._search = MarkerSearch(END, "", others=(CALL, RETURN))
        self._incomplete_header = ""
        self._openings: tuple[str, ...] = () if begin.header else _FIRST_OPENINGS
        self._purpose: Purpose | None = None
        self._shown_purposes: set[Purpose] = set()
        self._separate = False
        self._scanner = JsonValueScanner("{")
        self._state: Callable[[str], str] = self._in_header
        if begin.inside:
            self._begin(Header.read(begin.header))
        else:
            self._incomplete_header = begin.header

    def push(self, text: str) -> list[Part]:
        while text:
            text = self._state(text)
        return self._parts.take()

    def finish(self) -> list[Part]:
        if self._state == self._in_header:
            self._show_as_text()
        else:
            self._pass_on(self._search.flush())
        return self._parts.take()

    def _show_as_text(self) -> None:
        """Passes on a text that is not a header after all."""
        raw, self._incomplete_header = self._incomplete_header, ""
        if raw.strip() and not any(
            opening in raw for opening in (*_NEXT_OPENINGS, MESSAGE, CONSTRAIN)
        ):
            self._begin(Header.read(""))
            self._pass_on(raw)

    def _in_header(self, text: str) -> str:
        """Reads a header, or the space between messages until one begins."""
        raw = self._incomplete_header + text
        at = raw.find(MESSAGE)
        if not self._may_begin(raw) or (len(raw) if at < 0 else at) > MAX_HEADER_CHARS:
            self._incomplete_header = ""
            self._begin(Header.read(""))
            return raw
        if at < 0:
            self._incomplete_header = raw
            return ""
        self._incomplete_header = ""
        self._begin(Header.read(raw[:at]))
        return raw[at + len(MESSAGE) :]

    def _may_begin(self, raw: str) -> bool:
        raw = raw.lstrip(SPACE)
        if not self._openings:
            return True
        return any(each.startswith(raw) or raw.startswith(each) for each in self._openings)

    def _begin(self, header: Header) -> None:
        self._purpose = header.purpose(self._known)
        self._separate = self._purpose in self._shown_purposes
        self._state = self._in_content
        function = header.function(self._known)
        if function is not None:
            self._parts.start(function)
            self._shown_purposes.discard(Purpose.CALL)
            self._state = self._before_arguments

    def _in_content(self, text: str) -> str:
        shown, rest = self._search.push(text)
        self._pass_on(shown)
        if rest is None:
            return ""
        if self._purpose is Purpose.CALL and Purpose.CALL not in self._shown_purposes:
            self._parts.arguments("{}")
        self._search.flush()
        self._openings, self._state = _NEXT_OPENINGS, self._in_header
        return rest

    def _before_arguments(self, text: str) -> str:
        position = skip_space(text, 0)
        if position < len(text):
            self._scanner = JsonValueScanner("{")
            self._state = self._in_object if text[position] == "{" else self._in_content
        return text[position:]

    def _in_object(self, text: str) -> str:
        """Reads a call's arguments, in which markers are plain text."""
        end, complete = self._scanner.scan(text, 0)
        self._pass_on(text[:end])
        if complete:
            self._state, self._purpose = self._in_content, None
        return text[end:]

    def _pass_on(self, text: str) -> None:
        if not text or self._purpose is None:
            return
        if self._purpose is Purpose.CALL:
            self._parts.arguments(text)
        else:
            write = self._parts.text if self._purpose is Purpose.TEXT else self._parts.reasoning
            write(_SEPARATOR + text if self._separate else text)
        self._separate = False
        self._shown_purposes.add(self._purpose)
