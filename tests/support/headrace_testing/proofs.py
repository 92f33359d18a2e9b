"""What tests prove of each model, as marks at the tests say: the source of the table of models.

`@pytest.mark.proves(WHAT)` says that a test shows that a model can do something, and
`@pytest.mark.refuses(WHAT)` that an engine refuses it by name. The model is the shape (of
`checkpoints.SHAPES`) that the test's parameter `name` has, or the parameter that `by` names. Tests
without such a parameter have `shapes` or `architectures`. WHAT is one of `KINDS`.

The functions named pytest_... make this module a plugin of pytest, which writes down the marks of
all collected tests.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests" / "test_engine"
MARKS = ("proves", "refuses")
# `tokens` are those of transformers, through a native implementation.
Kind = Literal["tokens", "images", "native call", "quantised", "ranks", "adapters", "mtp"]
KINDS: tuple[Kind, ...] = (
    "tokens",
    "images",
    "native call",
    "quantised",
    "ranks",
    "adapters",
    "mtp",
)


@dataclass(frozen=True, slots=True, order=True)
class Proof:
    """One collected test. `model` is a shape's name, or with `published` an architecture's."""

    kind: str
    works: bool
    model: str
    published: bool


def proofs(session: pytest.Session | None = None) -> set[Proof]:
    """The proofs of all tests: those of the session if it has collected all tests. Otherwise a
    process of its own collects them, and runs none."""
    if session is not None and _has_all(session.config):
        return proofs_of(session)
    texts = {file: file.read_text() for file in sorted(TESTS.rglob("test_*.py"))}
    marked = [file for file, text in texts.items() if any(f".{mark}(" in text for mark in MARKS)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "proofs.json")
        command = [sys.executable, "-m", "pytest", "-p", __name__, f"--proofs={file}"]
        command += ["--collect-only", "--quiet", "-p", "no:cacheprovider"]
        support = os.pathsep.join((str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")))
        done = subprocess.run(
            [*command, *map(str, marked)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": support},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"tests cannot be collected:\n{done.stdout}{done.stderr}")
        return {Proof(*fields) for fields in json.loads(file.read_text())}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proofs", help="the file that the proofs of collected tests are written to")


def proofs_of(session: pytest.Session) -> set[Proof]:
    """The proofs of the tests that this session has collected."""
    return {proof for item in session.items for proof in _proofs_of(item)}


def _has_all(config: pytest.Config) -> bool:
    """Whether a folder of all these tests is collected, and no option selects some of them."""
    given = config.option
    selected = (given.keyword, given.deselect, given.ignore, given.ignore_glob)
    if any(selected) or given.markexpr not in config.getini("addopts"):
        return False
    folders = [Path(config.invocation_params.dir, each) for each in config.args]
    return any(map(TESTS.is_relative_to, folders))


def pytest_collection_finish(session: pytest.Session) -> None:
    found = sorted(proofs_of(session))
    rows = [(each.kind, each.works, each.model, each.published) for each in found]
    Path(session.config.getoption("--proofs")).write_text(json.dumps(rows))


def _proofs_of(item: pytest.Item) -> Iterator[Proof]:
    if item.get_closest_marker("skip") is not None:  # it proves nothing anywhere
        return
    for name in MARKS:
        for mark in item.iter_markers(name):
            (kind,) = mark.args
            assert kind in KINDS, f"{item.nodeid}: {kind} is none of {', '.join(KINDS)}"
            works = name == "proves"
            for model in mark.kwargs.get("architectures", ()):
                yield Proof(kind, works, model, published=True)
            for model in _shapes(item, mark.kwargs):
                yield Proof(kind, works, model, published=False)


def _shapes(item: pytest.Item, options: Mapping[str, Any]) -> tuple[str, ...]:
    if "architectures" in options or "shapes" in options:
        return tuple(options.get("shapes", ()))
    assert isinstance(item, pytest.Function)
    return (str(item.callspec.params[options.get("by", "name")]),)
