"""Checks the English of documents, docstrings and comments by the rules of prose.toml.

    python -m headrace_testing.prose [FILE ...]

proselint finds phrasings: those of its own checks and those listed in prose.toml. Code is not
prose, whether in blocks or in backticks.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from proselint.checks import __register__ as PROSELINT
from proselint.registry.checks import Check
from proselint.registry.checks.types import PreferredForms

from .import_layers import ROOT

RULES = ROOT / "prose.toml"
CODE = "`code`"
PACKAGES = ("cli", "common", "engine", "operator", "service")
_LIST_OF_CODE = re.compile(f"{CODE}(?:,? (?:and |or )?{CODE})+")
_BACKTICKS = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])[\"')]*\s+")
_DIRECTIVE = re.compile(r"#\s*(type:|noqa|ruff:|mypy:|pragma|!)")
_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, slots=True)
class Block:
    """Prose without a blank line in it. `kind`: "docstring" at its beginning, "title", or ""."""

    path: Path
    line: int
    text: str
    kind: str = ""

    def line_of(self, position: int) -> int:
        return self.line + self.text.count("\n", 0, position)


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence that breaks a rule."""

    path: Path
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message} [{self.rule}]"


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of prose.toml."""

    phrasings: tuple[Check, ...]
    longest_sentence: int
    not_first_in_docstrings: frozenset[str]
    not_first_in_sentences: frozenset[str]

    def findings(self, block: Block) -> Iterator[Finding]:
        for rule, position, message in self._broken(block):
            yield Finding(block.path, block.line_of(position), rule, message)

    def _broken(self, block: Block) -> Iterator[tuple[str, int, str]]:
        for check in self.phrasings:
            for found in check.check_with_flags(f"\n{block.text}\n"):
                yield check.path, max(found.span[0] - 1, 0), found.message
        for position, sentence in sentences(block.text):
            yield from self._broken_by(sentence, position, block.kind)
        first = first_word(block.text)
        if block.kind == "docstring" and first in self.not_first_in_docstrings:
            message = f"a docstring begins with a verb or a noun phrase, not with {first!r}"
            yield "docstring", 0, message

    def _broken_by(self, sentence: str, position: int, kind: str) -> Iterator[tuple[str, int, str]]:
        words, first = len(_LIST_OF_CODE.sub(CODE, sentence).split()), first_word(sentence)
        if words > self.longest_sentence:
            message = f"a sentence of {words} words, more than {self.longest_sentence}"
            yield "sentence", position, message
        if kind != "title" and first in self.not_first_in_sentences:
            yield (
                "who",
                position,
                f"a sentence begins with {first!r}: write 'a client that' or like",
            )


def rules() -> Rules:
    """The rules in prose.toml."""
    written = tomllib.loads(RULES.read_text())
    own = [
        Check(PreferredForms(forms), path=name, message="{1!r}: write {0}")
        for name, forms in written["phrasings"].items()
    ]
    theirs = [check for check in PROSELINT if any(map(check.matches_partial, written["proselint"]))]
    return Rules(
        phrasings=(*own, *theirs),
        longest_sentence=written["longest_sentence"],
        not_first_in_docstrings=frozenset(written["not_first_in_docstrings"]),
        not_first_in_sentences=frozenset(written["not_first_in_sentences"]),
    )


def first_word(text: str) -> str:
    return text.split(maxsplit=1)[0].strip(",.:;") if text.strip() else ""


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The sentences of a text, with where each begins."""
    begin = 0
    for end in _END_OF_SENTENCE.finditer(text):
        yield begin, text[begin : end.start()]
        begin = end.end()
    yield begin, text[begin:]


def blocks(path: Path) -> Iterator[Block]:
    """The prose of a file, a paragraph, cell or comment at a time."""
    text = path.read_text()
    name = path.relative_to(ROOT)
    found = _of_python(name, text) if path.suffix == ".py" else _of_markdown(name, text)
    return (block for block in found if block.text.strip())


def _of_markdown(path: Path, text: str) -> Iterator[Block]:
    line, kind = 0, ""
    for token in _PARSER.parse(text):
        line = token.map[0] if token.map else line
        if token.type == "inline":
            yield Block(path, line + 1, "".join(map(_shown, token.children or ())), kind)
        elif token.nesting == 1:
            kind = "title" if token.tag in ("h1", "h2", "h3", "h4", "td", "th") else ""


def _shown(token: Token) -> str:
    if token.type == "code_inline":
        return CODE
    return "\n" if token.type in ("softbreak", "hardbreak") else token.content


def _of_python(path: Path, text: str) -> Iterator[Block]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc is not None:
                yield from _paragraphs(path, node.body[0].lineno, doc)
    comment: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        alone = token.line.lstrip().startswith("#")
        if comment and not (alone and token.start[0] == last + 1):
            yield Block(path, begin, _BACKTICKS.sub(CODE, "\n".join(comment)))
            comment = []
        begin = begin if comment else token.start[0]
        comment.append(token.string.lstrip("# "))
        last = token.start[0]
    if comment:
        yield Block(path, begin, _BACKTICKS.sub(CODE, "\n".join(comment)))


def _paragraphs(path: Path, line: int, doc: str) -> Iterator[Block]:
    kind = "docstring"
    for paragraph in doc.split("\n\n"):
        if not paragraph.startswith("    "):
            yield Block(path, line, _BACKTICKS.sub(CODE, paragraph), kind)
        kind = ""
        line += paragraph.count("\n") + 2


def files() -> Iterator[Path]:
    """All documents, and the Python of all packages."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))
    for source in PACKAGES:
        yield from sorted((ROOT / source).rglob("*.py"))


def main(arguments: Sequence[str]) -> None:
    checked = rules()
    chosen = [Path(each).resolve() for each in arguments] or list(files())
    found = [
        finding for path in chosen for block in blocks(path) for finding in checked.findings(block)
    ]
    for finding in found:
        sys.stdout.write(f"{finding}\n")
    sys.stdout.write(f"prose: {len(chosen)} files, {len(found)} findings\n")
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
