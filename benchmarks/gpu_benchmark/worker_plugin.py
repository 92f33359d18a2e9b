"""A pytest plugin for each process that runs tests on a device."""

import os
import sys

import pytest

# The file with the names of tests that are not to be run, in the folder of pytest's settings.
LEFT_OUT = "left-out.txt"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    assert config.inipath is not None
    left_out = set((config.inipath.parent / LEFT_OUT).read_text().splitlines())
    items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Ends the process once a test has broken its device: every later test would fail."""
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and is_broken():
        os._exit(1)


def is_broken() -> bool:
    """Whether the device is unusable, after a kernel's invalid memory access."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():  # no test has used it
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
