"""The recipes of docs/development.md, "Where to add what": the files exist and contain the names
that a step mentions."""

import re
from pathlib import Path

import pytest

from headrace_testing.import_layers import ROOT
from headrace_testing.pages.architecture import SOURCES

PAGE = (ROOT / "docs" / "development.md").read_text()
SECTION = PAGE.split("## Where to add what\n")[1].split("\n## ")[0]
PACKAGES = {source: f"{source}/{package}" for package, source in SOURCES.items()}
STEPS = [" ".join(step.split()) for step in re.split(r"^\d\. ", SECTION, flags=re.MULTILINE)[1:]]
TESTS = ROOT / "tests"


def paths(step: str) -> list[Path]:
    """Files and folders that a step names.

    A file without a folder is in the folder of another file, or below `tests` if there is none.
    """
    named = [name for name in re.findall(r"`([\w…./-]+)`", step) if re.search(r"/|\.\w", name)]
    full = [_full(name) for name in named if "/" in name]
    folders = [path if path.is_dir() else path.parent for path in full] or [TESTS]
    for name in named:
        if "/" not in name:
            full += [path for folder in folders for path in folder.rglob(name)][:1] or [Path(name)]
    return full


def _full(name: str) -> Path:
    top, _, rest = name.partition("/…/")
    if rest:
        return ROOT / PACKAGES[top] / rest.replace("NAME", "admit")
    base = TESTS / "support" if name.startswith("headrace_testing/") else ROOT
    return base / name


@pytest.mark.parametrize("step", STEPS, ids=[step[:40] for step in STEPS])
def test_a_step_names_files_that_exist_and_have_its_names(step: str) -> None:
    named = paths(step)
    assert [path for path in named if not path.exists()] == []
    texts = [file.read_text() for path in named for file in _files(path)]
    for name in re.findall(r"`([A-Za-z_]\w+)`", step):
        assert any(re.search(rf"\b{name}\b", text) for text in texts), name


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.glob("*.py"))
