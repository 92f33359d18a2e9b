"""Words of a stream are not split at the terminal's edge."""

from io import StringIO

import pytest
from rich.console import Console

from headrace_cli.word_wrap import WordWrapper


def wrapped(*pieces: str, width: int = 10, terminal: bool = True) -> str:
    out = StringIO()
    writer = WordWrapper(Console(width=width, file=out, force_terminal=terminal, color_system=None))
    for piece in pieces:
        writer.write(piece)
    writer.flush()
    return out.getvalue()


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (("one two th", "ree"), "one two \nthree"),
        (("0123456789 ab",), "0123456789\nab"),
        (("a 0123456", "789abcd e"), "a \n0123456789\nabcd e"),
        (("a\n", "  b c"), "a\n  b c"),
        (("a\tb c",), "a\tb \nc"),
        (("\u4f60\u597d" * 3,), "\u4f60\u597d" * 2 + "\u4f60\n\u597d"),
    ],
    ids=["words", "a full line", "a long word", "an indent", "a tab", "wide characters"],
)
def test_a_line_ends_between_words(pieces: tuple[str, ...], text: str) -> None:
    assert wrapped(*pieces) == text


def test_other_output_is_unchanged() -> None:
    assert wrapped("one two th", "ree four", terminal=False) == "one two three four"


def test_a_style_applies_to_its_own_text_only() -> None:
    out = StringIO()
    writer = WordWrapper(Console(width=20, file=out, force_terminal=True, color_system="standard"))
    writer.write("hm", style="dim")
    writer.write("so")
    writer.flush()
    assert out.getvalue() == "\x1b[2mhm\x1b[0mso"
