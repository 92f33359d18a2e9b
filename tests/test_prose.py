"""The rules of prose.toml: what they find in documents and Python, and what they ignore."""

from pathlib import Path

import pytest

from headrace_testing import prose
from headrace_testing.prose import Rules

WORDS = " ".join(f"word{number}" for number in range(60))
DOCUMENT = f"""# Who decides

It waits for ever, `for ever` in code,
and nobody is there.

    nobody reads this block

| who | nobody |
| --- | --- |

Who asks is told. {WORDS}.
"""
MODULE = '''"""That hold so many."""

# nobody
COUNT = 1  # for ever
TEXT = "nobody"


def count() -> int:
    """Number of rows.

    Who asks is told.
    """
    return COUNT
'''


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    return tmp_path


def found(path: Path, text: str, rules: Rules) -> list[tuple[int, str]]:
    path.write_text(text)
    return sorted(
        (finding.line, finding.rule)
        for block in prose.blocks(path)
        for finding in rules.findings(block)
    )


def test_documents_are_checked_except_code_and_titles(root: Path) -> None:
    assert found(root / "page.md", DOCUMENT, prose.rules()) == [
        (3, "archaism"),
        (3, "for_ever"),
        (4, "no_one"),
        (8, "no_one"),
        (11, "sentence"),
        (11, "who"),
    ]


def test_docstrings_and_comments_are_checked(root: Path) -> None:
    assert found(root / "module.py", MODULE, prose.rules()) == [
        (1, "docstring"),
        (1, "so_many"),
        (1, "that_hold"),
        (3, "no_one"),
        (4, "archaism"),
        (4, "for_ever"),
        (11, "who"),
    ]
