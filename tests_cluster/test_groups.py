"""Engines of two pods each, by StatefulSets: they serve, lose pods, are scaled and rolled out, and
every answer is right."""

from typing import Any

import pytest

from headrace_cluster.load import Load
from headrace_cluster.release import PATIENCE_S, Release, Service, serve
from headrace_cluster.specs import MODEL, demo_service
from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until

CLIENTS = 4
NODES = 2
FIRST, SECOND = ({f"{MODEL}-engine-n{rank}-{index}" for rank in range(NODES)} for index in (0, 1))


@pytest.fixture(scope="module")
def service(release: Release) -> Service:
    """The demo model, served by two engines that have a pod on each of two nodes."""
    manifest = demo_service(replicas=2)
    manifest["spec"]["engine"] |= {"tensorParallelSize": NODES, "nodes": NODES}
    return serve(release, manifest)


@pytest.fixture
def load(service: Service, cases: list[GreedyCase]) -> Load:
    return Load(service.release.url, MODEL, cases, clients=CLIENTS)


def revisions(service: Service, engine: set[str]) -> set[Any]:
    """The values of one engine setting in the pods of an engine."""
    return {
        variable["value"]
        for pod in service.kubectl.items("pods", service.selector)
        if pod["metadata"]["name"] in engine
        for variable in pod["spec"]["containers"][0]["env"]
        if variable["name"] == "HEADRACE_ENGINE_MAX_NUM_SEQS"
    }


def test_two_pods_are_one_engine(service: Service, load: Load) -> None:
    assert set(service.engines()) == FIRST | SECOND
    assert service.status["replicas"] == service.status["readyReplicas"] == 2
    with load:
        load.await_answers(CLIENTS)


@pytest.mark.parametrize("rank", range(NODES))
def test_an_engine_whose_pod_is_lost_forms_again_and_others_continue_its_requests(
    service: Service, load: Load, rank: int
) -> None:
    lost = f"{MODEL}-engine-n{rank}-1"
    old = service.kubectl.get("pods", lost)["metadata"]["uid"]
    with load:
        load.await_answers(CLIENTS)
        service.kubectl.kill(lost)
        load.await_answers(2 * CLIENTS)
        service.until_ready(2)
        load.await_answers(CLIENTS)
    assert service.kubectl.get("pods", lost)["metadata"]["uid"] != old


def test_a_whole_engine_is_scaled_away_after_it_has_finished(service: Service, load: Load) -> None:
    with load:
        load.await_answers(CLIENTS)
        service.kubectl("scale", "modelservice", MODEL, "--replicas=1")
        service.until_ready(1)
        assert set(service.engines()) == FIRST
        load.await_answers(CLIENTS)
        service.kubectl("scale", "modelservice", MODEL, "--replicas=2")
        service.until_ready(2)
        load.await_answers(CLIENTS)


def test_a_rollout_replaces_whole_engines_one_after_the_other(service: Service, load: Load) -> None:
    with load:
        load.await_answers(CLIENTS)
        service.patch({"engine": {"settings": {"maxNumSeqs": 5}}})
        until(lambda: revisions(service, SECOND) == {"5"}, "engine 1 to be new", PATIENCE_S)
        assert "4" in revisions(service, FIRST), "engine 0 waits for engine 1"
        service.until_ready(2)
        load.await_answers(CLIENTS)
    assert revisions(service, FIRST | SECOND) == {"5"}


def test_nothing_is_left_of_it(service: Service) -> None:
    service.delete()
