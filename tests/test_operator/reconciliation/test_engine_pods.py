"""Facts that are read from the status of pods."""

import math
from typing import Any

import pytest

from headrace_operator import names
from headrace_operator.desired.workloads import WorkloadKind
from headrace_operator.reconciliation import engine_pods
from headrace_operator.reconciliation.engine_pods import Engine
from headrace_testing.kubernetes import group_pod, pod, set_pod
from headrace_testing.operators import engine_status


def singles(*pods: dict[str, Any]) -> list[Engine]:
    return engine_pods.engines(pods, WorkloadKind.DEPLOYMENT, 1)


def test_pods_that_leave_or_have_ended_do_not_count() -> None:
    leaving, failed, running = pod("a", "m"), pod("b", "m"), pod("c", "m")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    failed["status"]["phase"] = "Failed"
    assert engine_pods.live([leaving, failed, running]) == [running]


def test_pods_are_selected_by_their_track() -> None:
    stable, canary = pod("a", "m"), pod("b", "m", track=names.CANARY)
    assert engine_pods.of_track([stable, canary], names.CANARY) == [canary]


def test_an_address_needs_a_running_pod_with_an_ip() -> None:
    pending, running = pod("a", "m"), pod("b", "m", ip="::1", port=1234)
    pending["status"] = {"phase": "Pending"}
    (address,) = engine_pods.addresses([pending, running])
    assert address.url == "http://[::1]:1234/metrics"


def test_engines_are_found_by_their_pods_name() -> None:
    statuses = [engine_status("a", running=2), engine_status("gone")]
    found = singles(pod("a", "m"), pod("b", "m"))
    first, second = engine_pods.engine_pods(found, statuses, {"a": 5.0})
    assert first.status == statuses[0]
    assert first.cached_blocks == 5.0
    assert second.status is None


def test_a_new_engine_in_the_pod_hides_the_one_that_drained() -> None:
    old = engine_status("a", draining=True)
    new = engine_status("a", running=1)
    for statuses in ([old, new], [new, old]):
        (found,) = engine_pods.engine_pods(singles(pod("a", "m")), statuses, {})
        assert found.status == new


def test_a_start_lasts_from_creation_to_readiness() -> None:
    started = pod("a", "m")
    assert singles(started)[0].start_duration is None
    started["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    started["status"]["conditions"] = [
        {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:30Z"}
    ]
    assert singles(started)[0].start_duration == 90.0


@pytest.mark.parametrize(
    ("kind", "make", "first"),
    [
        (WorkloadKind.STATEFUL_SET, set_pod, "m-engine-n0-{}"),
        (WorkloadKind.LEADER_WORKER_SET, group_pod, "m-engine-{}"),
    ],
)
def test_an_engine_of_several_pods_is_ready_with_all_of_them(
    kind: WorkloadKind, make: Any, first: str
) -> None:
    pods = [make("m", 1, 1), make("m", 0, 1, ready=False), make("m", 0, 0), make("m", 2, 1)]
    pods.append(make("m", 1, 0))
    found = engine_pods.engines(pods, kind, 2)
    assert [each.name for each in found] == [first.format(index) for index in range(3)]
    assert [each.index for each in found] == [0, 1, 2]
    assert [each.ready for each in found] == [False, True, False], "the last has no node 0"
    assert [pod["metadata"]["name"] for pod in engine_pods.first_pods(found)] == [
        first.format(index) for index in range(2)
    ]
    assert found[1].pods == (pods[4], pods[0])


def test_pods_of_a_former_workload_are_no_engines() -> None:
    pods = [pod("a", "m"), set_pod("m", 0, 0), set_pod("m", 0, 1), group_pod("m", 0, 0)]
    assert [each.name for each in singles(*pods)] == ["a"]
    (found,) = engine_pods.engines(pods, WorkloadKind.STATEFUL_SET, 1)
    assert found.pods == (pods[1],), "node 1 is not wanted any more"
    assert found.ready


def test_an_engine_is_about_to_end_with_any_of_its_pods() -> None:
    going = [pod("a", "m"), set_pod("m", 3, 1)]
    for each in going:
        each["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    going[1]["metadata"]["deletionGracePeriodSeconds"] = 5
    stays = set_pod("m", 2, 1)
    found = engine_pods.terminating([*going, stays], WorkloadKind.STATEFUL_SET)
    assert found == {"a": math.inf, "m-engine-n0-3": 5}
