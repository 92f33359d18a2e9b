"""Runs the tests that need a GPU, for gpu.py, in several processes, since most of the time goes to
the compiler.

Failures and skipped tests are reported immediately, so that a run that is cut short loses none. A
process whose device a test has broken is replaced. After a test that hangs, gpu.py starts the tests
again, without those that have begun.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from .worker_plugin import LEFT_OUT

ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests" / "test_engine"
# Without a device these tests run in Triton's interpreter; with one they are compiled.
COMPILED = (
    "test_small_batch_gemm.py",
    "test_triton_ops.py",
    "test_triton_attention.py",
    "test_latents.py",
    "test_experts.py",
    "test_triton_lora.py",
    "test_triton_sampling.py",
    "test_fp8_weights.py",
    "test_triton_deterministic.py",
    "test_expert_adapters.py",
    "test_fused_norm.py",
    "test_triton_recurrent.py",
    "test_hybrid_triton.py",
)
INI = """[pytest]
addopts = --import-mode=importlib -p no:cacheprovider -p xdist -p gpu_benchmark.worker_plugin -rs -v
pythonpath = {paths}
faulthandler_timeout = 50
markers =
    gpu: needs a CUDA device
"""

# More processes would share the device's memory without compiling faster.
MOST_PROCESSES = 8

Report = Callable[..., None]


class Reporter:
    """A pytest plugin, which reports what did not pass and writes the names of tests that begin to
    the file `begun`."""

    def __init__(self, report: Report, begun: Path) -> None:
        self._report, self._begun = report, begun
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self._begun.open("a") as file:
            file.write(f"{nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self.counts[report.outcome] += 1
        if not report.passed:
            name = report.nodeid.rpartition("/")[2]
            self._report(f"{report.outcome}: {name}", reason=_reason(report))

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
    """The test files with tests that need a device."""
    return sorted(one.name for one in TESTS.rglob("test_*.py") if "mark.gpu" in one.read_text())


def run_tests(name: str, files: Sequence[str], out: Path, report: Report) -> None:
    """Runs tests that have not begun before, without the project's pytest settings, which name
    plugins that may be missing."""
    paths = [ROOT / "engine", ROOT / "common", ROOT / "benchmarks", ROOT / "tests" / "support"]
    ini, begun, left_out = (out / one for one in ("pytest.ini", f"begun-{name}.txt", LEFT_OUT))
    ini.write_text(INI.format(paths=" ".join(map(str, paths))))
    left_out.write_text(begun.read_text() if begun.exists() else "")
    reporter = Reporter(report, begun)
    processes = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2))
    arguments = ["-c", str(ini), "--rootdir", str(ROOT), "-n", str(processes)]
    found = [str(path) for name in files for path in TESTS.rglob(name)]
    pytest.main([*arguments, *found], plugins=[reporter])
    report("tests", **{kind: reporter.counts[kind] for kind in ("passed", "failed", "skipped")})
