"""Fixtures and hooks for all tests."""

import gc
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import certifi
import pytest

CERTIFICATE = "-----BEGIN CERTIFICATE-----"

# Collecting tests makes a million objects that stay alive, and the collector would visit them again
# and again.
gc.disable()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: torch's threads would wait for each other most of the time. Set here,
    # as folders' conftest.py files import torch before any hook runs.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    _trust_one_authority(config)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell starts `make test &` so, and programs that tests start would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """From here on the garbage collector is back, without what was collected."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _trust_one_authority(config: pytest.Config) -> None:
    """No test speaks TLS to the world, and each new HTTP client would parse the whole world's
    certificates, which takes longer than most tests."""
    _, first, *_ = Path(certifi.where()).read_text().split(CERTIFICATE)
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")
    file.write(CERTIFICATE + first)
    file.flush()
    config.add_cleanup(file.close)
    os.environ["SSL_CERT_FILE"] = file.name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists skipped tests by reason, so that no reader takes them for passed."""
    reports = terminalreporter.stats.get("skipped", ())
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section(f"not tested here: {reasons.total()}")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:6} {reason}")
