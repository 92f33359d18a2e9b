"""Runs tests with sealing: with HEADRACE_TEST_SEALED=1 every gateway and engine of a suite seals.

During the suite, the memory of its queue servers is searched for plain prompts and answers, and at
its end their append-only files (`sealed_watch`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace_common.sealing.keyring import Keyring, new_key, read_keyring, write_keyring

from .sealed_watch import Findings

MOST_SHOWN = 20
VARIABLE = "HEADRACE_TEST_SEALED"
_SETTINGS = ("HEADRACE_GATEWAY_SEALING_KEYS_FILE", "HEADRACE_ENGINE_SEALING_KEYS_FILE")


def wanted() -> bool:
    """Whether the environment asks for sealing."""
    return os.environ.get(VARIABLE) == "1"


def keys_of_the_suite() -> Keyring | None:
    """The suite's keys, for tests that act as a gateway; None without sealing."""
    path = os.environ.get(_SETTINGS[0])
    return None if path is None else read_keyring(Path(path).read_bytes())


def suite(request: pytest.FixtureRequest, folder: Path) -> Iterator[None]:
    """The body of a session-scoped fixture, which seals the queue of all tests if asked to."""
    if not wanted() or keys_of_the_suite() is not None:  # one suite seals for all in a session
        yield
        return
    findings = Findings()
    with sealed(folder, findings):
        yield
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    if reporter is not None and capture is not None:
        with capture.global_and_fixture_disabled():
            reporter.write_line("\n".join(["", str(findings), *findings.problems[:MOST_SHOWN]]))
    assert findings.problems == []


@contextmanager
def sealed(folder: Path, findings: Findings) -> Iterator[None]:
    """Seals all data of programs started in this block; `folder` is searched when it ends."""
    path = folder / "keyring"
    path.write_text(write_keyring([new_key()]))
    with _environment(dict.fromkeys(_SETTINGS, str(path))):
        given = (str(folder), str(path), str(os.getpid()))
        watch = subprocess.Popen(
            [sys.executable, "-m", "headrace_testing.sealed_watch", *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            yield
        finally:
            output, _ = watch.communicate()
    assert watch.returncode == 0, "the watch of the suite failed: its error is above"
    for name, value in json.loads(output).items():
        setattr(findings, name, value)


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
