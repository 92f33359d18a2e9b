"""The tests that need a GPU, run by gpu.py within its own process: each failure and each skipped
test is a result at once, so that what is cut short tells what it knows."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "test_engine"
# Run in the interpreter elsewhere, and compiled where there is a device.
COMPILED = (
    *("test_skinny.py", "test_triton_ops.py", "test_triton_attention.py", "test_experts.py"),
    *("test_triton_lora.py", "test_fp8_weights.py", "test_triton_deterministic.py"),
)
INI = """[pytest]
addopts = --import-mode=importlib -p no:cacheprovider -rs
pythonpath = {paths}
markers =
    gpu: needs a CUDA device
"""

Report = Callable[..., None]


class Reporter:
    """A plugin of pytest's."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self.counts[report.outcome] += 1
        if not report.passed:
            name = report.nodeid.rpartition("/")[2]
            why = _reason(report)
            self._report(f"{report.outcome}: {name}", reason=why)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.counts["error"] += 1
            self._report(f"not collected: {report.nodeid}", reason=_reason(report))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return " | ".join(line[1:].strip() for line in lines[:3])[:300]


def marked() -> list[str]:
    """Those that need a device: full shapes."""
    return sorted(one.name for one in TESTS.glob("test_*.py") if "mark.gpu" in one.read_text())


def run_tests(files: Sequence[str], out: Path, report: Report) -> None:
    """Without the project's own settings of pytest, which name plugins that may not be there."""
    paths = [ROOT / "engine", ROOT / "common", ROOT / "benchmarks", ROOT / "tests" / "support"]
    ini = out / "pytest.ini"
    ini.write_text(INI.format(paths=" ".join(map(str, paths))))
    reporter = Reporter(report)
    arguments = ["-c", str(ini), "--rootdir", str(ROOT)]
    found = [str(TESTS / name) for name in files if (TESTS / name).exists()]
    pytest.main([*arguments, *found], plugins=[reporter])
    report("tests", **{name: reporter.counts[name] for name in ("passed", "failed", "skipped")})
