"""Engines follow the load through the ingress: from none to several, and back to none."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace_cluster.load import Load
from headrace_cluster.metrics import scraped
from headrace_cluster.record import Recorder, plot
from headrace_cluster.release import ROOT, Release, Service
from headrace_cluster.simulated import apart, profile, simulated
from headrace_cluster.specs import MODEL, demo_service
from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until
from headrace_testing.prometheus import PrometheusServer

MOST = 3
# Settings that shorten ten minutes in production to seconds.
SCALING = {
    "mode": "operator",
    "minReplicas": 0,
    "maxReplicas": MOST,
    "idleSeconds": 10,
    "coldStartSeconds": 15,
    "targets": {"drainSeconds": 5, "oldestAgeSeconds": 5},
    "behavior": {
        "scaleDown": {
            "stabilizationWindowSeconds": 10,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 5}],
        }
    },
}
PATIENCE_S = 240.0
PICTURES = Path(os.environ.get("CLUSTER_PICTURES", ROOT / ".headrace" / "cluster"))


@pytest.fixture(scope="module")
def scaled(release: Release) -> Service:
    """A ModelService that was served once, because gateways learn a model from its first engine,
    and then became idle."""
    service = Service(release, MODEL)
    release.kubectl.apply(demo_service(scaling=SCALING))
    until(lambda: MODEL in release.models(), "the model to be known", PATIENCE_S)
    until_none(service)
    return service


@pytest.fixture
def prometheus(scaled: Service, tmp_path: Path) -> Iterator[PrometheusServer]:
    """Reads the metrics of the release; draws the operator's dashboard at the end."""
    with scraped(scaled.release, tmp_path) as server:
        began = time.time()
        yield server
        draw_dashboard(server, began)


def test_replicas_follow_the_load_as_simulated_and_every_answer_is_right(
    scaled: Service, prometheus: PrometheusServer, long_cases: list[GreedyCase]
) -> None:
    few, many = 1, 32
    recorder = Recorder(scaled, prometheus)

    @contextmanager
    def load(clients: int) -> Iterator[Load]:
        with Load(scaled.release.url, MODEL, long_cases, clients=clients, stream=False) as load:
            recorder.watch(load)
            yield load

    with recorder:
        with load(few) as light:
            light.await_answers(10)
            until(lambda: recorder.most("desired") > 0, "an engine to be wanted", PATIENCE_S)
        one = recorder.most("desired")
        with load(many) as heavy:
            until(lambda: recorder.most("ready") == MOST, f"{MOST} engines to be ready", PATIENCE_S)
            heavy.await_answers(many)
        with load(few) as last:
            until(lambda: recorder.last.desired < MOST, "engines to leave under load", PATIENCE_S)
            last.await_answers(few)
        until_none(scaled)
    plot(recorder.samples, PICTURES / "scaling.png")

    assert one == 1
    prompt, tokens = len(long_cases[0].prompt), len(long_cases[0].output)
    engine = profile(
        light.answered[-5:],
        heavy.answered[-many:],
        tokens,
        MOST,
        scaled.status["coldStartSeconds"],
    )
    answered = [*light.answered, *heavy.answered, *last.answered]
    decided = simulated(answered, recorder.began, (prompt, tokens), engine, SCALING)
    busy = [sample for sample in recorder.samples if sample.at <= decided[-1][0]]
    assert apart(busy, decided) == []
    reasons = [event["reason"] for event in scaled.kubectl.events(MODEL)]
    assert {"ScaledUp", "ScaledDown"} <= set(reasons)


def test_a_model_without_engines_is_listed_and_one_request_starts_it(
    scaled: Service, cases: list[GreedyCase]
) -> None:
    until_none(scaled)
    assert scaled.release.models() == [MODEL]

    with Load(scaled.release.url, MODEL, cases, clients=1, requests=1) as load:
        load.join()

    until_none(scaled)


def test_an_operator_that_starts_while_requests_wait_starts_engines(
    scaled: Service, cases: list[GreedyCase]
) -> None:
    release, kubectl = scaled.release, scaled.kubectl
    until_none(scaled)
    kubectl("scale", "deployment", "headrace-operator", "--replicas=0")
    until(lambda: not release.pods("operator"), "the operator to be gone")

    with Load(release.url, MODEL, cases, clients=2, requests=2) as load:
        until(lambda: load.in_flight() == 2, "the requests to wait")
        assert scaled.engines() == []
        kubectl("scale", "deployment", "headrace-operator", "--replicas=1")
        load.join()

    until_none(scaled)


def until_none(service: Service) -> None:
    until(lambda: service.engines() == [], "no engine to be left", PATIENCE_S)


def draw_dashboard(prometheus: PrometheusServer, began: float) -> None:
    """Draws what Grafana shows of the operator since `began`, Unix time."""
    program = ROOT / "charts" / "generate" / "pictures.py"
    source = ("--url", f"http://127.0.0.1:{prometheus.port}", "--since", str(began))
    folder = str(PICTURES / "dashboards")
    subprocess.run(
        [sys.executable, str(program), *source, "--into", folder, "operator"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
        check=True,
    )
