"""The code blocks of README and docs, and the shell commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:(?<=\n\n)|(?<=\A))((?:^    .*\n(?:[ \t]*\n(?=    ))*)+)", re.MULTILINE)
_ASSIGNMENT = re.compile(r"\w+=\S*")
_SEPARATORS = frozenset({"|", "||", "&&", ";", "&", "|&"})


@dataclass(frozen=True)
class Block:
    """Code of a page; `language` is empty if it is only indented."""

    page: Path
    language: str
    text: str


def blocks() -> Iterator[Block]:
    """All blocks of all pages."""
    for page in PAGES:
        text = page.read_text()
        for language, code in _FENCE.findall(text):
            yield Block(page, language, code)
        for code in _INDENTED.findall(_FENCE.sub("", text)):
            yield Block(page, "", re.sub(r"^    ", "", code, flags=re.MULTILINE))


@dataclass(frozen=True)
class Command:
    """A simple command of a block, without preceding variables, redirections and comments."""

    page: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.name}: {shlex.join(self.words)}"[:90]


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block in a shell's language."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in (*_words(line), ";"):
            if word in _SEPARATORS:
                if words:
                    yield Command(block.page, tuple(words))
                words = []
            elif words or not _ASSIGNMENT.fullmatch(word):
                words.append(word)


def _words(line: str) -> Iterator[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    skip = False
    for word in lexer:
        if word[0] in "<>" and set(word) <= set("<>&"):
            skip = True
        elif skip:
            skip = False
        else:
            yield word
