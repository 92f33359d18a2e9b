"""Runs the tests that depend on the version of Python with every Python that is installed:

    make test-pythons ARGS="3.13 --whole"

Each Python has its own environment, such as `.venvs/3.13`, with the packages of `make install-dev`.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).parents[3]
VERSIONS = "3.11", "3.12", "3.13", "3.14"
# Tests of the event loop, TLS, processes, annotations, ctypes, Triton's parsing of Python, and
# end-to-end tests.
TESTS = (
    *("test_common", "test_gateway", "test_operator", "test_cli", "test_make.py", "test_skips.py"),
    "test_engine/kernels/test_kernels.py",
    "test_engine/offline/test_llm.py",
    "test_engine/checkpoints/test_loading.py",
    "test_engine/engine/test_engine_loop.py",
    "test_engine/serving/test_metrics.py",
    "test_engine/distributed/test_rank_processes.py",
    "test_engine/sampling/test_triton_sampling.py",
    "test_e2e/test_cancel.py",
    "test_e2e/test_streams.py",
    "test_e2e/test_up.py",
)
NOT_BUILT = "its environment could not be made"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one Python's tests; `failed` counts errors too."""

    passed: int
    failed: int
    skipped: int
    seconds: float


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-pythons ARGS=")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="such as 3.13; default: all")
    parser.add_argument("--whole", action="store_true", help="run all tests")
    given = parser.parse_args(arguments)
    tests = [] if given.whole else [f"tests/{name}" for name in TESTS]
    versions = given.versions or VERSIONS
    results = {version: run(version, tests) for version in versions}
    sys.stdout.write("\n".join((*table(results), "")))
    found = [result for result in results.values() if result != "not found"]
    good = [result for result in found if isinstance(result, Result) and not result.failed]
    return 0 if found and good == found else 1


def run(version: str, tests: Sequence[str]) -> Result | str:
    """Runs tests with a version of Python. Returns the reason if it cannot."""
    python = find(version)
    if python is None:
        return "not found"
    sys.stderr.write(f"Python {version}: {python}\n")
    environment = ROOT / ".venvs" / version
    try:
        prepare(environment, python)
    except subprocess.CalledProcessError as error:
        return f"{NOT_BUILT}: {error.cmd[0]} exited with {error.returncode}"
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder", "-q"
        program = environment / "bin/python", "-m", "pytest", *options, f"--junitxml={report}"
        subprocess.run([*program, *tests], cwd=ROOT)
        return read(report)


def find(version: str) -> Path | None:
    """A program that is this version of Python: of pyenv, on the PATH, or of uv."""
    return next((path for path in candidates(version) if is_version(path, version)), None)


def candidates(version: str) -> Iterator[Path]:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python"), key=by_number, reverse=True)
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    if uv := shutil.which("uv"):
        find = [uv, "python", "find", "--no-python-downloads", version]
        yield Path(subprocess.run(find, capture_output=True, text=True).stdout.strip())


def by_number(path: Path) -> list[int]:
    """Sorts 3.13.9 before 3.13.10."""
    return [int(part) for part in path.parts[-3].split(".") if part.isdigit()]


def is_version(python: Path, version: str) -> bool:
    """Whether a program runs as this version; pyenv's shims may refuse to."""
    command = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return False
    return done.stdout == f"{version}\n"


def prepare(environment: Path, python: Path) -> None:
    """Makes an environment with the Makefile's rules, again if the declared packages have changed.

    Raises CalledProcessError.
    """
    command = ["make", "--no-print-directory", "install-dev"]
    named = [f"VENV={environment.relative_to(ROOT)}", f"PYTHON={python}"]
    subprocess.run([*command, *named], cwd=ROOT, check=True)


def read(report: Path) -> Result | str:
    """Reads a report of pytest; an interrupted run leaves none."""
    if not report.exists():
        return "pytest ended without a report"
    (suite,) = ElementTree.parse(report).getroot()
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return Result(passed, failed, counts["skipped"], float(suite.get("time", 0)))


def table(results: dict[str, Result | str]) -> Iterator[str]:
    yield "python   passed  failed  skipped  seconds"
    for version, result in results.items():
        if isinstance(result, str):
            yield f"{version:6}   {result}"
        else:
            counts = f"{result.passed:8} {result.failed:7} {result.skipped:8}"
            yield f"{version:6} {counts} {result.seconds:8.0f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
