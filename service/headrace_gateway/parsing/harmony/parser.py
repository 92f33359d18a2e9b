"""Reads Harmony: each message is reasoning, text for the user, or a call, as its header says.

Text without a header is text. The result is the same however the text is cut.
"""

from collections.abc import Callable, Collection

from ..parts import Part, PartList
from ..tool_calls.scanning import SPACE, JsonValueScanner, MarkerSearch, skip_space
from .header import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, Begin, Header, Purpose

MAX_HEADER_CHARS = 256
# What is put between two messages of the same purpose.
_SEPARATOR = "\n\n"
# How a text's first header can begin (its author is in the prompt), and a later one.
_FIRST = (CHANNEL, START, MESSAGE, CONSTRAIN, "to=")
_NEXT = (START, CHANNEL)


class HarmonyParser:
    """Reads one choice's text. `known` are the functions that may be called; None: none."""

    def __init__(
        self, parts: PartList, known: Collection[str] | None, begin: Begin | None = None
    ) -> None:
        begin = begin or Begin()
        self._parts = parts
        self._known = known
        self._search = MarkerSearch(END, "", others=(CALL, RETURN))
        self._raw = ""  # of a header that is not complete
        self._openings: tuple[str, ...] = () if begin.header else _FIRST
        self._purpose: Purpose | None = None
        self._said: set[Purpose] = set()
        self._separate = False
        self._scanner = JsonValueScanner("{")
        self._state: Callable[[str], str] = self._in_header
        if begin.inside:
            self._begin(Header.read(begin.header))
        else:
            self._raw = begin.header

    def push(self, text: str) -> list[Part]:
        while text:
            text = self._state(text)
        return self._parts.take()

    def finish(self) -> list[Part]:
        if self._state == self._in_header:
            self._show_raw()
        else:
            self._show(self._search.flush())
        return self._parts.take()

    def _show_raw(self) -> None:
        """Shows what turned out to be no header; a real header is not shown."""
        raw, self._raw = self._raw, ""
        if raw.strip() and not any(opening in raw for opening in (*_NEXT, MESSAGE, CONSTRAIN)):
            self._begin(Header.read(""))
            self._show(raw)

    def _in_header(self, text: str) -> str:
        """Reads a header, or the space between messages until one begins."""
        raw = self._raw + text
        at = raw.find(MESSAGE)
        if not self._may_begin(raw) or (len(raw) if at < 0 else at) > MAX_HEADER_CHARS:
            self._raw = ""
            self._begin(Header.read(""))
            return raw
        if at < 0:
            self._raw = raw
            return ""
        self._raw = ""
        self._begin(Header.read(raw[:at]))
        return raw[at + len(MESSAGE) :]

    def _may_begin(self, raw: str) -> bool:
        raw = raw.lstrip(SPACE)
        if not self._openings:
            return True
        return any(each.startswith(raw) or raw.startswith(each) for each in self._openings)

    def _begin(self, header: Header) -> None:
        self._purpose = header.purpose(self._known)
        self._separate = self._purpose in self._said
        self._state = self._in_content
        function = header.function(self._known)
        if function is not None:
            self._parts.start(function)
            self._said.discard(Purpose.CALL)
            self._state = self._before_arguments

    def _in_content(self, text: str) -> str:
        shown, behind = self._search.push(text)
        self._show(shown)
        if behind is None:
            return ""
        if self._purpose is Purpose.CALL and Purpose.CALL not in self._said:
            self._parts.arguments("{}")
        self._search.flush()
        self._openings, self._state = _NEXT, self._in_header
        return behind

    def _before_arguments(self, text: str) -> str:
        position = skip_space(text, 0)
        if position < len(text):
            self._scanner = JsonValueScanner("{")
            self._state = self._in_object if text[position] == "{" else self._in_content
        return text[position:]

    def _in_object(self, text: str) -> str:
        """Reads a call's arguments, in which markers are plain text."""
        end, complete = self._scanner.scan(text, 0)
        self._show(text[:end])
        if complete:
            self._state, self._purpose = self._in_content, None
        return text[end:]

    def _show(self, text: str) -> None:
        if not text or self._purpose is None:
            return
        if self._purpose is Purpose.CALL:
            self._parts.arguments(text)
        else:
            write = self._parts.text if self._purpose is Purpose.TEXT else self._parts.reasoning
            write(_SEPARATOR + text if self._separate else text)
        self._separate = False
        self._said.add(self._purpose)
