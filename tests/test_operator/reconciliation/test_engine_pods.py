"""Facts that are read from the status of pods."""

from headrace_operator import names
from headrace_operator.reconciliation import engine_pods
from headrace_testing.kubernetes import pod
from headrace_testing.operators import engine_status


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
    first, second = engine_pods.engine_pods([pod("a", "m"), pod("b", "m")], statuses, {"a": 5.0})
    assert first.status == statuses[0]
    assert first.cached_blocks == 5.0
    assert second.status is None


def test_a_new_engine_in_the_pod_hides_the_one_that_drained() -> None:
    old = engine_status("a", draining=True)
    new = engine_status("a", running=1)
    for statuses in ([old, new], [new, old]):
        (found,) = engine_pods.engine_pods([pod("a", "m")], statuses, {})
        assert found.status == new


def test_a_start_lasts_from_creation_to_readiness() -> None:
    started = pod("a", "m")
    assert engine_pods.start_duration(started) is None
    started["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    started["status"]["conditions"] = [
        {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:30Z"}
    ]
    assert engine_pods.start_duration(started) == 90.0
