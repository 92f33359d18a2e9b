"""Writes text as it comes, without breaking words at a terminal's edge."""

from rich.cells import cell_len
from rich.console import Console

_TAB = 8


class WordWrapper:
    """Writes text to a console, in pieces that may end within a word.

    On a terminal the beginning of a word is held back until its end is known; `flush` writes it.
    Elsewhere text is written as it is.
    """

    def __init__(self, out: Console) -> None:
        self._out = out
        self._word = ""
        self._style = ""
        self._column = 0

    def write(self, text: str, style: str = "") -> None:
        if style != self._style:
            self._end_word()
            self._style = style
        if self._out.is_terminal:
            for character in text:
                self._take(character)
        else:
            self._put(text)
        self._out.file.flush()

    def flush(self) -> None:
        """Writes what was held back; the next text begins a line."""
        self._end_word()
        self._column = 0
        self._out.file.flush()

    def _take(self, character: str) -> None:
        if character == "\n":
            self._end_word()
            self._put(character)
            self._column = 0
        elif character.isspace():
            self._end_word()
            self._space(character)
        else:
            wide = cell_len(character) > 1  # scripts without spaces, which may break anywhere
            if wide:
                self._end_word()
            self._word += character
            if wide or cell_len(self._word) >= self._out.width:
                self._end_word()

    def _space(self, character: str) -> None:
        """Writes spaces, except at the terminal's edge."""
        if self._column < self._out.width:
            self._put(character)
            self._column += _TAB - self._column % _TAB if character == "\t" else 1

    def _end_word(self) -> None:
        if not self._word:
            return
        cells = cell_len(self._word)
        if self._column and self._column + cells > self._out.width:
            self._put("\n")
            self._column = 0
        self._put(self._word)
        self._column += cells
        self._word = ""

    def _put(self, text: str) -> None:
        if self._style:
            self._out.print(
                text, end="", style=self._style, markup=False, highlight=False, soft_wrap=True
            )
        else:
            self._out.file.write(text)  # the console would expand tabs
