"""Files whose tests share processes run in one worker; the processes end with the last of them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace_testing.distribution import FIRST, TESTS, TOGETHER, Shared, place

FILE = """
import os
from pathlib import Path

def test_it():
    Path(__file__).with_suffix(".worker").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""
PLUGIN = """
from pathlib import Path
from headrace_testing import distribution

distribution.TESTS = Path(__file__).parent
distribution.UNITS = {"test_a.py": "forked", "test_d.py": "forked"}
"""


def test_files_of_a_unit_run_in_one_worker(tmp_path: Path) -> None:
    """Without units, workers would get the files in turn: `a` and `c`, `b` and `d`."""
    files = {name: tmp_path / f"test_{name}.py" for name in "abcd"}
    for file in files.values():
        file.write_text(FILE)
    (tmp_path / "units.py").write_text(PLUGIN)
    plugins = ("conftest", "units", "xdist")
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path)),
            *(part for plugin in plugins for part in ("-p", plugin)),
            *("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", str(tmp_path)),
        ],
        env={
            "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "support", tmp_path))),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        check=True,
    )
    workers = {name: file.with_suffix(".worker").read_text() for name, file in files.items()}
    assert workers["a"] == workers["d"] != workers["b"]


def test_listed_files_exist() -> None:
    listed = [file for files in TOGETHER.values() for file in files]
    alone = [name for name in FIRST if name not in TOGETHER]
    assert [file for file in (*listed, *alone) if not (TESTS / file).exists()] == []


def test_listed_files_come_first_in_their_order() -> None:
    assert set(TOGETHER) <= set(FIRST)
    listed = [TESTS / file for name in FIRST for file in TOGETHER.get(name, (name,))]
    other = TESTS / "test_e2e/test_clocks.py"
    assert sorted([other, *reversed(listed)], key=place) == [*listed, other]


def test_a_file_that_is_not_listed_gets_nothing_that_is_shared() -> None:
    with pytest.raises(AssertionError, match=r"test_clocks\.py uses what served shares"):
        Shared().get("served", TESTS / "test_e2e/test_clocks.py", opened)


def test_what_is_shared_is_made_once_until_it_is_closed() -> None:
    shared, user = Shared(), TESTS / "test_e2e/test_up.py"
    first = shared.get("served", user, opened)
    assert shared.get("served", TESTS / "test_e2e/test_readme.py", opened) is first
    shared.close()
    assert first == ["closed"]
    assert shared.get("served", user, opened) == []


@contextmanager
def opened() -> Iterator[list[str]]:
    events: list[str] = []
    yield events
    events.append("closed")
