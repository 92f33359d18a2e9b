"""Pods die and operators change while clients stream: every answer is right."""

import json
from collections.abc import Iterator

import pytest

from headrace_cluster.kubectl import PodLog
from headrace_cluster.load import Load
from headrace_cluster.release import Release, Service, serve
from headrace_cluster.specs import MODEL, demo_service
from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until

CLIENTS = 8
GATEWAY = "headrace-gateway"
OPERATOR = "headrace-operator"


@pytest.fixture(scope="module")
def service(release: Release) -> Iterator[Service]:
    """The demo model with two engines and two gateways, so that the second takes over when one
    dies."""
    release.kubectl("scale", "deployment", GATEWAY, "--replicas=2")
    release.until_rolled_out(f"deployment/{GATEWAY}")
    yield serve(release, demo_service(replicas=2))
    release.kubectl("scale", "deployment", GATEWAY, "--replicas=1")
    until(lambda: len(release.pods("gateway")) == 1, "one gateway to be left")


@pytest.fixture
def load(service: Service, cases: list[GreedyCase]) -> Load:
    return Load(service.release.url, MODEL, cases, clients=CLIENTS)


def test_engine_killed(service: Service, load: Load) -> None:
    with load:
        load.await_answers(CLIENTS)
        service.kubectl.kill(service.engines()[0])
        load.await_answers(2 * CLIENTS)

    service.until_ready(2)


def test_engine_evicted_as_a_node_drain_does(service: Service, load: Load) -> None:
    with load:
        load.await_answers(CLIENTS)
        evict(service, service.engines()[0])
        load.await_answers(2 * CLIENTS)

    service.until_ready(2)


def test_engine_scaled_away_finishes_its_streams(service: Service, load: Load) -> None:
    with load:
        load.await_answers(CLIENTS)
        service.kubectl("scale", "modelservice", MODEL, "--replicas=1")
        service.until_ready(1)
        load.await_answers(CLIENTS)

    service.kubectl("scale", "modelservice", MODEL, "--replicas=2")
    service.until_ready(2)


def test_valkey_killed(service: Service, load: Load) -> None:
    release = service.release
    (pod,) = release.pods("redis")
    old_uid = release.kubectl.get("pods", pod)["metadata"]["uid"]
    with load:
        load.await_answers(CLIENTS)
        release.kubectl.kill(pod)
        release.until_rolled_out("statefulset/headrace-redis")
        load.await_answers(2 * CLIENTS)

    assert release.kubectl.get("pods", pod)["metadata"]["uid"] != old_uid
    service.until_ready(2)


def test_gateway_deleted_finishes_its_streams(service: Service, load: Load) -> None:
    release = service.release
    old = release.pods("gateway")[0]
    with load, PodLog(release.kubectl, old) as log:
        load.await_answers(CLIENTS)
        release.kubectl("delete", "pod", old, "--wait=true")
        release.until_rolled_out(f"deployment/{GATEWAY}")
        load.await_answers(2 * CLIENTS)

    assert old not in release.pods("gateway")
    ended = log.entries("request ended")
    assert ended
    assert [entry for entry in ended if entry["error_type"] == "shutting_down"] == []


def test_gateway_killed(service: Service, load: Load) -> None:
    """The gateway's clients resume at the other gateway, and no request stays in the queue."""
    release = service.release
    with load:
        load.await_answers(CLIENTS)
        release.kubectl.kill(release.pods("gateway")[0])
        release.until_rolled_out(f"deployment/{GATEWAY}")
        load.await_answers(2 * CLIENTS)

    until(lambda: service.status.get("backlog") == 0, "the queue to be empty")


def test_operator_killed_in_the_middle_of_a_change(service: Service, load: Load) -> None:
    with load:
        load.await_answers(CLIENTS)
        service.patch({"replicas": 3, "engine": {"settings": {"maxNumSeqs": 5}}})
        until(lambda: len(service.engines()) > 2, "the change to begin")
        service.kubectl.kill(service.release.pods("operator")[0])
        service.until_ready(3)
        service.patch({"replicas": 2})
        service.until_ready(2)


def test_of_two_operators_one_works_and_the_other_takes_over(service: Service) -> None:
    release, kubectl = service.release, service.kubectl
    kubectl("scale", "deployment", OPERATOR, "--replicas=2")
    release.until_rolled_out(f"deployment/{OPERATOR}")
    leader = holder(release)
    assert leader in release.pods("operator")

    kubectl.kill(leader)
    until(lambda: holder(release) not in ("", leader), "the other operator to lead")
    service.patch({"replicas": 1})
    service.until_ready(1)

    kubectl("scale", "deployment", OPERATOR, "--replicas=1")
    release.until_rolled_out(f"deployment/{OPERATOR}")
    service.patch({"replicas": 2})
    service.until_ready(2)


def test_without_an_operator_nothing_changes(service: Service, load: Load) -> None:
    release, kubectl = service.release, service.kubectl
    before = service.engines()
    kubectl("scale", "deployment", OPERATOR, "--replicas=0")
    until(lambda: not release.pods("operator"), "the operator to be gone")
    with load:
        load.await_answers(2 * CLIENTS)

    assert service.engines() == before
    kubectl("scale", "deployment", OPERATOR, "--replicas=1")
    release.until_rolled_out(f"deployment/{OPERATOR}")


def holder(release: Release) -> str:
    """The pod that holds the operators' lease."""
    leases = [
        lease for lease in release.kubectl.items("leases") if OPERATOR in lease["metadata"]["name"]
    ]
    assert len(leases) == 1
    identity = str(leases[0]["spec"].get("holderIdentity") or "")
    return next((pod for pod in release.pods("operator") if identity.startswith(pod)), "")


def evict(service: Service, pod: str) -> None:
    """Evicts a pod through the API of `kubectl drain`, which respects disruption budgets."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": service.release.namespace},
    }
    path = f"/api/v1/namespaces/{service.release.namespace}/pods/{pod}/eviction"
    service.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
