"""Reads a person's messages: one line each, or several, with a history that is kept in a file."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

_BLOCK = '"""'
_MOST_LINES = 1000


class MessageReader:
    """Reads messages from standard input.

    On a terminal, a line that ends with a backslash continues. Three double quotes begin and end a
    message of several lines. `history` is the file of earlier lines; None keeps none.
    """

    def __init__(self, history: Path | None) -> None:
        self._terminal = sys.stdin.isatty()
        self._history = history if self._terminal else None
        self._editor = _line_editor() if self._terminal else None
        if self._editor is not None and self._history is not None:
            self._editor.set_history_length(_MOST_LINES)
            with suppress(OSError):
                self._editor.read_history_file(self._history)

    def read(self) -> str | None:
        """The next message, or None at the end of the input."""
        try:
            return self._message() if self._terminal else input().strip()
        except (EOFError, KeyboardInterrupt):
            return None

    def _message(self) -> str:
        line = self._line("> ").strip()
        if line.startswith(_BLOCK):
            return self._block(line.removeprefix(_BLOCK))
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(". ").rstrip()
        return "\n".join([*lines, line]).strip()

    def _block(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(_BLOCK):
            lines.append(self._line(". "))
        return "\n".join(lines).rstrip().removesuffix(_BLOCK).strip()

    def _line(self, prompt: str) -> str:
        line = input(prompt)
        self._keep()
        return line

    def _keep(self) -> None:
        """Writes the history at once, as a chat may be killed. Others of this user cannot read it.

        A folder that cannot be written costs the history, not the chat.
        """
        if self._history is None or self._editor is None:
            return
        with suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            self._editor.write_history_file(self._history)


def history_file() -> Path:
    """In the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "headrace" / "chat_history"


def _line_editor() -> ModuleType | None:
    """Makes input() use line editing, where this Python has it."""
    try:
        import readline
    except ImportError:
        return None  # some builds of Python lack it; input() works without
    readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    return readline
