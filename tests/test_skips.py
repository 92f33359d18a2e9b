"""Skipped tests are listed by reason at the end of a run, even with pytest-xdist's workers."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import pytest
from headrace_testing.needs import missing

@pytest.mark.parametrize("number", range(3))
def test_device(number): pytest.skip("no device")

@pytest.mark.skipif(True, reason="no device")
def test_marked(): pass

def test_program(): missing("program: make it")

def test_right(): pass
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "test_it.py"
    path.write_text(PROGRAM)
    return path


def run(program: Path, *options: str, **environment: str) -> list[str]:
    """The lines that pytest prints for a test file with the settings of these tests."""
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "conftest", *options, program],
        env={
            "PYTHONPATH": f"{tests}:{tests}/support",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # starting workers takes most of the time
            **environment,
        },
        cwd=program.parent,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "options", [[], ["-p", "xdist", "-n", "1"]], ids=["one process", "workers"]
)
def test_skipped_tests_are_counted_by_reason(program: Path, options: list[str]) -> None:
    lines = run(program, *options)
    at = next(n for n, line in enumerate(lines) if "not tested here: 5" in line)
    assert lines[at + 1 : at + 3] == ["     4 no device", "     1 no program: make it"]
    assert "1 passed, 5 skipped" in lines[-1]


def test_missing_programs_fail_tests_in_ci(program: Path) -> None:
    lines = run(program, CI="1")
    assert any("no program: make it (CI must have it)" in line for line in lines)
    assert "1 failed, 1 passed, 4 skipped" in lines[-1]
