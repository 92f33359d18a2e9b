"""The tests that need a GPU, run by gpu.py within its own process.

Failures and skipped tests are reported immediately, so that a run that is cut short loses none. A
test that hangs, or breaks the device, ends the process; the next process continues with the test
after it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests" / "test_engine"
# Elsewhere these run in the interpreter; with a device, compiled.
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
addopts = --import-mode=importlib -p no:cacheprovider -rs -v
pythonpath = {paths}
markers =
    gpu: needs a CUDA device
"""

Report = Callable[..., None]


class Reporter:
    """A pytest plugin.

    `begun` is a file with the names of tests that an earlier process began; they are left out.
    """

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
                pytest.exit(f"the device is broken after {name}", returncode=1)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.counts["error"] += 1
            self._report(f"not collected: {report.nodeid}", reason=_reason(report))


def is_broken() -> bool:
    """Whether the device is unusable, after a kernel's invalid memory access."""
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
    """The test files with tests that need a device."""
    return sorted(one.name for one in TESTS.rglob("test_*.py") if "mark.gpu" in one.read_text())


def run_tests(name: str, files: Sequence[str], out: Path, report: Report) -> None:
    """Runs tests without the project's pytest settings, which name plugins that may be missing.

    Raises RuntimeError if a test leaves the device unusable.
    """
    paths = [ROOT / "engine", ROOT / "common", ROOT / "benchmarks", ROOT / "tests" / "support"]
    ini = out / "pytest.ini"
    ini.write_text(INI.format(paths=" ".join(map(str, paths))))
    reporter = Reporter(report, out / f"begun-{name}.txt")
    arguments = ["-c", str(ini), "--rootdir", str(ROOT)]
    found = [str(path) for name in files for path in TESTS.rglob(name)]
    pytest.main([*arguments, *found], plugins=[reporter])
    report("tests", **{kind: reporter.counts[kind] for kind in ("passed", "failed", "skipped")})
    if is_broken():
        raise RuntimeError("the device is broken")
