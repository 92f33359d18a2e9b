"""Fixtures and hooks for all tests."""

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import certifi
import pytest

from headrace_testing import distribution

CERTIFICATE = "-----BEGIN CERTIFICATE-----"

# Collecting tests makes a million objects that stay alive. Without this the garbage collector would
# visit them again and again.
gc.disable()

# Set before anything imports torch. Its threads that wait give up the core at once, and processes
# that share the cores have one thread each.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    _trust_one_authority(config)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell gives `make test &` this signal setting, and programs that tests start would
        # inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Switches the garbage collector back on; it skips the objects that collection has made, and
    visits old ones seldom: tests make few cycles and end soon."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 50)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: distribution.place(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Gives torch back its number of threads, which an engine of the test may have set. With two
    threads in each worker, later tests would wait for each other's."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    try:
        return (yield)
    finally:
        if torch and torch.get_num_threads() != before:
            torch.set_num_threads(before)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(
    config: pytest.Config, log: object
) -> "distribution.TogetherScheduling | None":
    together = config.getoption("dist") == "loadfile"
    return distribution.TogetherScheduling(config, log) if together else None


def _trust_one_authority(config: pytest.Config) -> None:
    """Makes HTTP clients trust one certificate authority.

    No test speaks TLS to the internet, and to parse all of its certificates for each new client
    would take longer than most tests.
    """
    _, first, *_ = Path(certifi.where()).read_text().split(CERTIFICATE)
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")
    file.write(CERTIFICATE + first)
    file.flush()
    config.add_cleanup(file.close)
    os.environ["SSL_CERT_FILE"] = file.name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists skipped tests by reason, so that no reader believes that they passed."""
    reports = terminalreporter.stats.get("skipped", ())
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section(f"not tested here: {reasons.total()}")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:6} {reason}")
