"""The tests that need a GPU, run by gpu.py within its own process: each failure and each skipped
test is a result at once, so that what is cut short tells what it knows. A test that hangs, or
leaves a broken device behind, ends the process; the next one goes on behind it."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests" / "test_engine"
# Run in the interpreter elsewhere, and compiled where there is a device.
COMPILED = (
    *("test_skinny.py", "test_triton_ops.py", "test_triton_attention.py", "test_experts.py"),
    *(
        "test_triton_lora.py",
        "test_triton_sampling.py",
        "test_fp8_weights.py",
        "test_triton_deterministic.py",
        "test_expert_adapters.py",
        "test_fused_norm.py",
    ),
)
INI = """[pytest]
addopts = --import-mode=importlib -p no:cacheprovider -rs -v
pythonpath = {paths}
markers =
    gpu: needs a CUDA device
"""

Report = Callable[..., None]


class Reporter:
    """A plugin of pytest's. `begun` is a file with the names of tests that were begun: they are
    left out."""

    def __init__(self, report: Report, begun: Path) -> None:
        self._report, self._begun = report, begun
        self._before = set(begun.read_text().splitlines()) if begun.exists() else set()
        self.counts: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._before]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self._begun.open("a") as file:
            file.write(f"{nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self.counts[report.outcome] += 1
        if not report.passed:
            name = report.nodeid.rpartition("/")[2]
            why = _reason(report)
            self._report(f"{report.outcome}: {name}", reason=why)
            if report.failed and is_broken():
                pytest.exit(f"the device is broken behind {name}", returncode=1)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.counts["error"] += 1
            self._report(f"not collected: {report.nodeid}", reason=_reason(report))


def is_broken() -> bool:
    """Whether nothing can run on the device any more, after a kernel's bad access of memory."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return " | ".join(line[1:].strip() for line in lines[:3])[:300]


def marked() -> list[str]:
    """Those that need a device: full shapes."""
    return sorted(one.name for one in TESTS.glob("test_*.py") if "mark.gpu" in one.read_text())


def run_tests(name: str, files: Sequence[str], out: Path, report: Report) -> None:
    """Without the project's own settings of pytest, which name plugins that may not be there.
    Raises RuntimeError where a test left a broken device."""
    paths = [ROOT / "engine", ROOT / "common", ROOT / "benchmarks", ROOT / "tests" / "support"]
    ini = out / "pytest.ini"
    ini.write_text(INI.format(paths=" ".join(map(str, paths))))
    reporter = Reporter(report, out / f"begun-{name}.txt")
    arguments = ["-c", str(ini), "--rootdir", str(ROOT)]
    found = [str(TESTS / name) for name in files if (TESTS / name).exists()]
    pytest.main([*arguments, *found], plugins=[reporter])
    report("tests", **{kind: reporter.counts[kind] for kind in ("passed", "failed", "skipped")})
    if is_broken():
        raise RuntimeError("the device is broken")
