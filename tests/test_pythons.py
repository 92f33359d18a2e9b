"""Every installed Python is found, and the results of its tests are reported."""

import tomllib
from pathlib import Path

import pytest

from headrace_testing import pythons
from headrace_testing.pythons import VERSIONS, Result

REPORT = (
    '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3" time="4.6"/></testsuites>'
)


def program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho {says}\n")
    path.chmod(0o755)
    return path


def test_the_newest_of_pyenv_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    for patch in (9, 10):
        newest = program(tmp_path / f"versions/3.13.{patch}/bin/python", "3.13")
    assert pythons.find("3.13") == newest


def test_a_program_that_is_another_python_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, the shim of a pyenv that does not use that version."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin/python3.13", "3.12").parent))
    assert pythons.find("3.13") is None


@pytest.mark.parametrize("status", [0, 1])
def test_make_fills_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Nothing is tested in one that could not be filled."""
    monkeypatch.setattr(pythons, "ROOT", tmp_path)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    found = program(tmp_path / "versions/3.13.1/bin/python", "3.13")
    tested = program(tmp_path / ".venvs/3.13/bin/python", "tested > tested")
    rule = f"install-dev:\n\t@echo $(VENV) $(PYTHON) > made; exit {status}\n"
    (tmp_path / "Makefile").write_text(rule)
    result = pythons.run("3.13", [])
    assert (tmp_path / "made").read_text() == f".venvs/3.13 {found}\n"
    assert (tmp_path / "tested").exists() is (status == 0), tested
    assert result == (
        f"{pythons.NOT_BUILT}: make exited with 2" if status else "pytest ended without a report"
    )


def test_the_report_lists_the_results_of_each_python(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert pythons.read(report) == "pytest ended without a report"
    report.write_text(REPORT)
    result = pythons.read(report)
    assert result == Result(passed=3, failed=3, skipped=3, seconds=4.6)
    assert list(pythons.table({"3.13": result, "3.14": "not found"})) == [
        "python   passed  failed  skipped  seconds",
        "3.13          3       3        3        5",
        "3.14     not found",
    ]


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ({"3.13": Result(3, 0, 1, 1.0)}, 0),
        ({"3.13": Result(3, 1, 1, 1.0)}, 1),
        ({"3.13": "pytest ended without a report"}, 1),
        ({}, 1),
    ],
    ids=["passed", "failed", "cut short", "none found"],
)
def test_it_fails_unless_all_that_were_found_pass(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, Result | str], status: int
) -> None:
    monkeypatch.setattr(pythons, "run", lambda version, _: results.get(version, "not found"))
    assert pythons.main([]) == status


def test_the_tests_of_each_python_exist() -> None:
    assert all((pythons.ROOT / "tests" / name).exists() for name in pythons.TESTS)


def test_classifiers_name_only_versions_that_are_run() -> None:
    project = tomllib.loads((pythons.ROOT / "pyproject.toml").read_text())["project"]
    named = {line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line}
    assert named and named <= set(VERSIONS)
