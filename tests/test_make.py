"""`make install` with a Python that is too old, removed, or another one than before; the packages
that `make up` and `make test` install; `make check` with a check that fails."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_testing.processes import until

# A fake Python that reports another version, and makes environments that contain itself.
PYTHON = """#!/bin/sh
case "$1$2" in
  -mvenv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit {venv} ;;
  -mpytest) echo tested >> log ;;
  -mheadrace_testing.*) echo "$2" >> log ;;
  requirements/install_lock*) printf '#!/bin/sh\necho served >> log' > .venv/bin/headrace
    chmod +x .venv/bin/headrace; echo "$@" >> log ;;
  requirements/*) echo "$@" >> log ;;
  *) exec {real} -c "import sys; sys.version_info = {version}; $2" ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).parents[1] / "Makefile", tmp_path)
    (tmp_path / "requirements").mkdir()
    locks = [f"requirements/{name}" for name in ("up.txt", "dev.txt", "uv.txt", "install_lock.py")]
    for name in ("pyproject.toml", "hatch_build.py", *locks):
        (tmp_path / name).touch()
    return tmp_path


def python(path: Path, minor: int, venv: int = 0) -> Path:
    """A program that claims to be Python 3.`minor`; `venv` is the exit status of its module
    venv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PYTHON.format(real=sys.executable, version=(3, minor, 1), venv=venv))
    path.chmod(0o755)
    return path


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments],
        cwd=folder, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True,
    )  # fmt: skip


def test_a_python_that_is_too_old_is_refused_at_once(folder: Path) -> None:
    old = python(folder / "old", 10)
    done = make(folder, "install", f"PYTHON={old}")
    assert done.returncode != 0
    wanted = f"{old} is 3.10; Headrace needs 3.11 or newer: make install PYTHON=python3.12\n"
    assert done.stdout == wanted


def test_a_missing_python_is_named(folder: Path) -> None:
    done = make(folder, "install", PYTHON="python3.99")
    assert done.returncode != 0
    assert done.stdout.startswith("python3.99 does not run; Headrace needs 3.11 or newer")


@pytest.mark.parametrize("minor", [10, 12], ids=["too old", "another"])
def test_an_environment_of_another_python_is_replaced(folder: Path, minor: int) -> None:
    python(folder / ".venv/bin/python", minor)
    (folder / ".venv/.installed-up").touch()
    done = make(folder, "install", f"PYTHON={python(folder / 'new', 13)}")
    assert f"the Python of .venv is 3.{minor}: .venv is replaced, with Python 3.13\n" in done.stdout
    assert "(3, 13, 1)" in (folder / ".venv/bin/python").read_text()
    assert (folder / ".venv/.installed-up").exists()


def test_an_environment_stays_while_no_other_python_is_named(folder: Path) -> None:
    python(folder / ".venv/bin/python", 12)
    (folder / ".venv/.installed-up").touch()
    assert make(folder, "install").stdout == ""
    assert "(3, 12, 1)" in (folder / ".venv/bin/python").read_text()


def test_a_failed_environment_is_removed(folder: Path) -> None:
    """Simulates Debian's python3 without the package python3-venv."""
    done = make(folder, "install", f"PYTHON={python(folder / 'bare', 13, venv=1)}")
    assert done.returncode != 0
    assert not (folder / ".venv").exists()


def test_make_up_installs_only_runtime_packages_and_make_test_adds_the_rest(folder: Path) -> None:
    new = f"PYTHON={python(folder / 'new', 13)}"
    install = "requirements/install_lock.py"
    rest = [f"{install} --all-kernels dev", "requirements/compile_packages.py", "tested"]

    done = make(folder, "up", new)
    assert done.returncode == 0
    assert done.stdout.startswith("installing packages into .venv")
    until(lambda: len(lines(folder)) == 3, "bytecode to be compiled beside the server")
    first, *others = lines(folder)
    assert first == f"{install} up"
    assert sorted(line.split()[0] for line in others) == [rest[1], "served"]
    (folder / "log").unlink()

    assert make(folder, "test", new).returncode == 0
    assert lines(folder) == rest
    assert make(folder, "test", new).returncode == 0
    assert lines(folder) == [*rest, "tested"]


@pytest.mark.parametrize("broken", ["", "mypy", "mkdocs"])
def test_check_fails_with_the_check_that_fails(folder: Path, broken: str) -> None:
    programs = folder / ".venv/bin"
    python(programs / "python", 13)
    for name in ("ruff", "mypy", "lint-imports", "mkdocs"):
        status = int(name == broken)
        (programs / name).write_text(f"#!/bin/sh\necho {name} >> log\nexit {status}\n")
        (programs / name).chmod(0o755)
    for name in (".installed-up", ".installed"):
        (folder / ".venv" / name).touch()

    assert (make(folder, "check").returncode == 0) is (not broken)
    assert {"mypy", "lint-imports", "headrace_testing.prose", "mkdocs"} <= set(lines(folder))


def lines(folder: Path) -> list[str]:
    """The installations and runs, in order."""
    return (folder / "log").read_text().splitlines()
