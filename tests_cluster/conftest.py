"""A release of the chart on the cluster that KUBECONFIG names, and the expected answers."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from headrace_cluster.kubectl import CommandFailed
from headrace_cluster.release import (
    INSTALLED,
    Release,
    Service,
    installation,
    remove_left_releases,
    serve,
)
from headrace_cluster.specs import demo_service
from headrace_common.text.checkpoint import resolve
from headrace_testing.greedy import GreedyCase, clear_cases

CASES = 24
OUTPUT_TOKENS = 64
LONG_OUTPUT_TOKENS = 256
VOCABULARY = 2048  # of the demo model
ALONE = ("test_install.py", "test_readme.py", "test_sentinel.py")


@pytest.fixture(scope="session", autouse=True)
def _one_release() -> None:
    remove_left_releases()


@pytest.fixture(scope="session")
def long_cases() -> list[GreedyCase]:
    """Prompts of the demo model with their greedy outputs, confirmed by transformers."""
    checkpoint = resolve("headrace-demo", None)
    return clear_cases(checkpoint, CASES, LONG_OUTPUT_TOKENS, vocabulary=VOCABULARY)


@pytest.fixture(scope="session")
def cases(long_cases: list[GreedyCase]) -> list[GreedyCase]:
    """The same cases with shorter outputs for the engines."""
    return [GreedyCase(case.prompt, case.output[:OUTPUT_TOKENS]) for case in long_cases]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs modules with their own release first, because there may be only one release at a
    time."""
    items.sort(key=lambda item: item.path.name not in ALONE)


@pytest.fixture(scope="session")
def installed() -> Iterator[Release]:
    """A release installed with ci/small-values.yaml, of which nothing is left afterwards."""
    with installation() as release:
        yield release


@pytest.fixture(scope="module")
def release(installed: Release) -> Iterator[Release]:
    """The installed release; every module gets it without ModelServices."""
    yield installed
    if "KEEP" not in os.environ:
        installed.reset()


@pytest.fixture(scope="module")
def service(release: Release) -> Service:
    """The demo model, served by one engine."""
    return serve(release, demo_service())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Prints the state of the cluster if a test fails."""
    report: pytest.TestReport = yield
    if report.failed:
        for release in INSTALLED:
            report.sections.append((f"namespace {release.namespace}", _picture(release)))
    return report


def _picture(release: Release) -> str:
    kubectl = release.kubectl
    asked = [
        ("get", "modelservices,deployments,statefulsets,pods,leases", "-o", "wide"),
        ("describe", "modelservices"),
        ("get", "events", "--sort-by=.lastTimestamp"),
        ("logs", "--selector=app.kubernetes.io/part-of=headrace", "--tail=25", "--prefix"),
    ]
    output = []
    for arguments in asked:
        try:
            output.append(kubectl(*arguments))
        except CommandFailed as error:
            output.append(str(error))
    return "\n".join(output)
