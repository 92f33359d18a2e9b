"""A release of the chart on the cluster that KUBECONFIG names, and what it must answer."""

import os
from typing import Any

import pytest

from headrace_cluster.kubectl import CommandFailed
from headrace_cluster.release import Release, Service
from headrace_cluster.specs import MODEL, demo_service
from headrace_common.checkpoint import resolve
from headrace_testing.greedy import GreedyCase, clear_cases
from headrace_testing.processes import until

CASES = 24
OUTPUT_TOKENS = 64
LONG_OUTPUT_TOKENS = 256
VOCABULARY = 2048  # of the demo model

_releases: list[Release] = []


@pytest.fixture(scope="session")
def cases() -> list[GreedyCase]:
    """Prompts of the demo model with their greedy outputs, confirmed by transformers."""
    checkpoint = resolve("headrace-demo", None)
    return clear_cases(checkpoint, CASES, OUTPUT_TOKENS, vocabulary=VOCABULARY)


@pytest.fixture(scope="session")
def long_cases() -> list[GreedyCase]:
    """As `cases`, with more work for the engines."""
    checkpoint = resolve("headrace-demo", None)
    return clear_cases(checkpoint, CASES, LONG_OUTPUT_TOKENS, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def release(request: pytest.FixtureRequest) -> Release:
    """Installed with ci/small-values.yaml; nothing of it is left afterwards."""
    release = Release()
    _releases.append(release)
    request.addfinalizer(lambda: _remove(release))
    release.install()
    return release


def _remove(release: Release) -> None:
    _releases.remove(release)
    if "KEEP" not in os.environ:
        release.remove()


@pytest.fixture(scope="module")
def service(release: Release) -> Service:
    """The demo model, served by one engine."""
    service = Service(release, MODEL)
    release.kubectl.apply(demo_service())
    service.until_ready(1)
    until(lambda: MODEL in release.models(), f"{MODEL} to be listed")
    return service


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A failed test says what the cluster looked like."""
    report: pytest.TestReport = yield
    if report.failed:
        for release in _releases:
            report.sections.append((f"namespace {release.namespace}", _picture(release)))
    return report


def _picture(release: Release) -> str:
    kubectl = release.kubectl
    asked = [
        ("get", "modelservices,deployments,pods,leases", "-o", "wide"),
        ("describe", "modelservices"),
        ("get", "events", "--sort-by=.lastTimestamp"),
        ("logs", "--selector=app.kubernetes.io/part-of=headrace", "--tail=25", "--prefix"),
    ]
    said = []
    for arguments in asked:
        try:
            said.append(kubectl(*arguments))
        except CommandFailed as error:
            said.append(str(error))
    return "\n".join(said)
