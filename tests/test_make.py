"""`make install` with a Python that is too old, gone, or another one than before."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Says that it is of another version, and makes environments that hold itself.
PYTHON = """#!/bin/sh
case "$1$2" in
  -mvenv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  -mpip) ;;
  *) exec {real} -c "import sys; sys.version_info = {version}; $2" ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).parents[1] / "Makefile", tmp_path)
    (tmp_path / "requirements").mkdir()
    for name in ("pyproject.toml", "requirements/dev.txt", "hatch_build.py"):
        (tmp_path / name).touch()
    return tmp_path


def python(path: Path, minor: int) -> Path:
    """A program that takes itself for Python 3.`minor`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PYTHON.format(real=sys.executable, version=(3, minor, 1)))
    path.chmod(0o755)
    return path


def install(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "install", *arguments],
        cwd=folder, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True,
    )  # fmt: skip


def test_a_python_that_is_too_old_is_refused_at_once(folder: Path) -> None:
    old = python(folder / "old", 10)
    done = install(folder, f"PYTHON={old}")
    assert done.returncode != 0
    wanted = f"{old} is 3.10; Headrace needs 3.11 or newer: make install PYTHON=python3.12\n"
    assert done.stdout == wanted


def test_a_python_that_is_not_there_is_named(folder: Path) -> None:
    done = install(folder, PYTHON="python3.99")
    assert done.returncode != 0
    assert done.stdout.startswith("python3.99 does not run; Headrace needs 3.11 or newer")


@pytest.mark.parametrize("minor", [10, 12], ids=["too old", "another"])
def test_an_environment_of_another_python_is_made_anew(folder: Path, minor: int) -> None:
    python(folder / ".venv/bin/python", minor)
    (folder / ".venv/.installed").touch()
    done = install(folder, f"PYTHON={python(folder / 'new', 13)}")
    assert f"the Python of .venv is 3.{minor}: it is made anew with 3.13\n" in done.stdout
    assert "(3, 13, 1)" in (folder / ".venv/bin/python").read_text()
    assert (folder / ".venv/.installed").exists()


def test_an_environment_stays_while_no_other_python_is_named(folder: Path) -> None:
    python(folder / ".venv/bin/python", 12)
    (folder / ".venv/.installed").touch()
    assert install(folder).stdout == ""
    assert "(3, 12, 1)" in (folder / ".venv/bin/python").read_text()
