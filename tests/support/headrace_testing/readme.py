"""The commands in the README, as they are printed."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def block(language: str, word: str) -> str:
    """The only code block of the README that contains this word."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", _text(), re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if word in text]
    return str(found)


def first_command() -> str:
    """The first line that is indented as code."""
    found = re.search(r"^    (\S.*)$", _text(), re.MULTILINE)
    assert found is not None
    return found[1]


def _text() -> str:
    return (ROOT / "README.md").read_text()
