"""Conditions and transitions: each state has its reason, and is reported once."""

from typing import Any

import pytest

from headrace_operator.cluster.drain import Draining
from headrace_operator.errors import InvalidSpec
from headrace_operator.reconciliation import status
from headrace_operator.reconciliation.status import Observations
from headrace_operator.scaling.decision import Decision
from headrace_operator.scaling.history import History
from headrace_operator.scaling.observation import EngineSignals, QueueSignals
from headrace_operator.scaling.reason import Reason, ScalingLimit
from headrace_operator.signals.signals import Signals
from headrace_testing.model_services import service

NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z


def seen(**changes: Any) -> Observations:
    return Observations(**{"replicas": 2, "ready": 2, "updated": 2, "desired": 2, **changes})


def decision(reason: Reason = Reason.STEADY, **changes: Any) -> Decision:
    values = {"replicas": 2, "wanted": 2, "message": "text", "history": History(), **changes}
    return Decision(reason=reason, **values)


def waiting(count: int, age: float = 0.0) -> Signals:
    queue = QueueSignals(waiting=count, oldest_age=age)
    engines = EngineSignals(running=8, capacity=8, kv_utilization=0.416, tokens_per_second=1234.5)
    return Signals(at=NOW, queue=queue, engines=engines)


def reasons(found: Observations, **spec: Any) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in status.conditions(service(**spec), found)}


@pytest.mark.parametrize(
    ("found", "kind", "expected"),
    [
        (seen(), "Ready", ("True", "EnginesReady")),
        (seen(ready=0), "Ready", ("False", "NoEngineReady")),
        (seen(ready=0, desired=0, updated=0), "Ready", ("True", "ScaledToZero")),
        (seen(ready=0, problem=("OOMKilled", "pod p")), "Ready", ("False", "OOMKilled")),
        (seen(ready=1, problem=("OOMKilled", "pod p")), "Ready", ("True", "EnginesReady")),
        (seen(problem=("RedisUnreachable", "no way")), "Ready", ("True", "EnginesReady")),
        (
            seen(ready=0, desired=0, problem=("RedisUnreachable", "no way")),
            "Ready",
            ("False", "RedisUnreachable"),
        ),
        (seen(signals=waiting(16, age=1.0)), "Ready", ("True", "EnginesReady")),
        (seen(signals=waiting(16, age=11.0)), "Ready", ("True", "Saturated")),
        (
            seen(signals=waiting(16), decision=decision(limited=ScalingLimit.MAX_REPLICAS)),
            "Ready",
            ("True", "Saturated"),
        ),
        (seen(), "Progressing", ("False", "Complete")),
        (seen(ready=1), "Progressing", ("True", "EnginesStarting")),
        (seen(updated=1), "Progressing", ("True", "RollingOut")),
        (seen(replicas=3), "Progressing", ("True", "RollingOut")),
        (seen(replicas=0, ready=0, updated=0), "Progressing", ("True", "EnginesStarting")),
        (
            seen(draining=(Draining(pod="p", engine_id="e", since=0),)),
            "Progressing",
            ("True", "Draining"),
        ),
        (seen(), "Degraded", ("False", "AsExpected")),
        (seen(problem=("Unschedulable", "no GPU")), "Degraded", ("True", "Unschedulable")),
        (seen(), "ScalingActive", ("Unknown", "NotDecided")),
        (seen(decision=decision()), "ScalingActive", ("True", "Steady")),
        (
            seen(decision=decision(Reason.STALE_METRICS, frozen=True)),
            "ScalingActive",
            ("False", "MetricsStale"),
        ),
        (
            seen(decision=decision(Reason.INITIAL_SCALE), signals_problem="no gateway"),
            "ScalingActive",
            ("True", "InitialScale"),
        ),
        (
            seen(
                decision=decision(Reason.MISSING_METRICS, frozen=True), signals_problem="no gateway"
            ),
            "ScalingActive",
            ("False", "MetricsMissing"),
        ),
        (seen(decision=decision()), "ScalingLimited", ("False", "WithinLimits")),
        (
            seen(decision=decision(limited=ScalingLimit.MAX_REPLICAS)),
            "ScalingLimited",
            ("True", "TooManyReplicas"),
        ),
    ],
)
def test_each_state_has_its_reason(
    found: Observations, kind: str, expected: tuple[str, str]
) -> None:
    assert reasons(found)[kind] == expected


def test_other_scaling_modes_name_the_scaler() -> None:
    for mode, word in (("none", "ScaledByHand"), ("hpa", "ScaledByHPA")):
        assert reasons(seen(), scaling={"mode": mode})["ScalingActive"] == ("True", word)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (seen(), "EnginesReady"),
        (seen(ready=0), "NoEngineReady"),
        (seen(ready=0, problem=("ModelNotFound", "/m: no such folder")), "ModelNotFound"),
        (seen(ready=1, problem=("OOMKilled", "pod p")), "OOMKilled"),
        (seen(problem=("RedisUnreachable", "no way")), "RedisUnreachable"),
        (seen(updated=1, decision=decision(Reason.STEADY)), "RollingOut"),
        (seen(ready=1, signals=waiting(16, age=11.0)), "Saturated"),
        (seen(ready=0, desired=0), "ScaledToZero"),
    ],
)
def test_the_status_has_the_most_important_reason(found: Observations, reason: str) -> None:
    written = status.status_of(service(), found, {}, NOW)
    assert written["reason"] == reason
    assert written["message"] in {condition["message"] for condition in written["conditions"]}


def test_a_saturated_service_says_how_many_requests_wait_and_why() -> None:
    found = seen(
        signals=waiting(16, age=12.3), decision=decision(limited=ScalingLimit.MAX_REPLICAS)
    )
    assert status.status_of(service(), found, {}, NOW)["message"] == (
        "2 of 2 engines ready; 16 requests wait, the oldest for 12 s, and scaling.maxReplicas "
        "allows no more engines"
    )


def test_a_service_that_shares_an_accelerator_says_whether_its_engine_sleeps() -> None:
    sharing = {"group": "gpu"}
    found = seen(
        ready=1,
        desired=1,
        asleep=1,
        signals=waiting(16, age=12.3),
        decision=decision(limited=ScalingLimit.MAX_REPLICAS),
    )
    written = status.status_of(service(sharing=sharing), found, {}, NOW)
    assert written["asleepReplicas"] == 1
    assert written["message"] == (
        "1 of 1 engine ready, 1 asleep while another has the accelerator; 16 requests wait, the "
        "oldest for 12 s, longer than scaling.targets.oldestAgeSeconds"
    )
    awake = status.status_of(service(sharing=sharing), seen(), {}, NOW)
    assert awake["asleepReplicas"] == 0 and "asleep" not in awake["message"]
    assert status.status_of(service(), seen(), {}, NOW)["asleepReplicas"] is None


def test_the_status_shows_the_engines_load_in_whole_numbers() -> None:
    found = status.status_of(service(), seen(signals=waiting(3), cold_start=27.6), {}, NOW)
    shown = ("backlog", "tokensPerSecond", "kvCachePercent", "coldStartSeconds")
    assert [found[key] for key in shown] == [3, 1234, 42, 28]
    unknown = status.status_of(service(), seen(), {}, NOW)
    assert [unknown[key] for key in shown] == [None] * 4


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    first = status.status_of(service(), seen(), {}, NOW)
    later = status.status_of(service(), seen(ready=0), first, NOW + 60)
    times = {c["type"]: c["lastTransitionTime"] for c in later["conditions"]}
    assert times["Degraded"] == "2026-01-01T00:00:00Z"
    assert times["Ready"] == "2026-01-01T00:01:00Z"


def test_a_decision_keeps_its_time_while_its_result_is_the_same() -> None:
    first = status.status_of(service(), seen(decision=decision()), {}, NOW)
    same = status.status_of(service(), seen(decision=decision(message="new")), first, NOW + 60)
    assert same["lastDecision"]["time"] == "2026-01-01T00:00:00Z"
    assert same["lastDecision"]["message"] == "new"
    other = seen(decision=decision(Reason.BACKLOG, replicas=3))
    changed = status.status_of(service(), other, same, NOW + 60)
    assert changed["lastDecision"]["time"] == "2026-01-01T00:01:00Z"


def test_drains_survive_in_the_status() -> None:
    draining = (Draining(pod="p", engine_id="e", since=NOW),)
    assert status.drains(status.status_of(service(), seen(draining=draining), {}, NOW)) == list(
        draining
    )
    assert status.drains({}) == []


def test_an_invalid_spec_degrades_and_leaves_the_rest() -> None:
    before = status.status_of(service(), seen(), {}, NOW)
    failed = status.failed_status(7, InvalidSpec("spec.x", "is wrong"), before, NOW + 5)
    assert failed["observedGeneration"] == 7
    found = {c["type"]: c for c in failed["conditions"]}
    assert found["Degraded"]["reason"] == "InvalidSpec"
    assert found["Degraded"]["message"] == "spec.x: is wrong"
    assert found["Ready"]["reason"] == "EnginesReady"


def test_events_are_made_of_transitions_alone() -> None:
    fresh = status.status_of(service(), seen(ready=0), {}, NOW)["conditions"]
    assert status.transitions((), fresh) == []
    assert status.transitions(fresh, fresh) == []
    well = status.status_of(service(), seen(), {"conditions": fresh}, NOW)["conditions"]
    changes = {c.reason: c.kind for c in status.transitions(fresh, well)}
    assert changes == {"EnginesReady": "Normal", "Complete": "Normal"}


def test_the_loss_of_the_last_engine_is_a_warning_but_a_start_from_zero_is_not() -> None:
    kinds = []
    for before in (seen(), seen(ready=0, desired=0)):
        old = status.status_of(service(), before, {}, NOW)["conditions"]
        new = status.status_of(service(), seen(ready=0), {"conditions": old}, NOW)["conditions"]
        reported = {c.reason: c.kind for c in status.transitions(old, new)}
        kinds.append(reported["NoEngineReady"])
    assert kinds == ["Warning", "Normal"]


def test_only_the_upper_limit_gives_an_event() -> None:
    free = status.status_of(service(), seen(decision=decision()), {}, NOW)["conditions"]
    reported = {}
    for limit in ScalingLimit:
        held = seen(decision=decision(limited=limit))
        now = status.status_of(service(), held, {"conditions": free}, NOW)["conditions"]
        reported[limit] = [c.reason for c in status.transitions(free, now)]
    assert reported == {limit: [] for limit in ScalingLimit} | {
        ScalingLimit.MAX_REPLICAS: ["TooManyReplicas"]
    }


def test_problems_of_a_new_model_service_are_reported_at_once() -> None:
    error = InvalidSpec("spec.x", "is wrong")
    failed = status.failed_status(1, error, {}, NOW)["conditions"]
    assert [(c.kind, c.reason) for c in status.transitions((), failed)] == [
        ("Warning", "InvalidSpec")
    ]


def test_a_new_problem_is_a_new_event() -> None:
    one = status.status_of(service(), seen(problem=("A", "")), {}, NOW)["conditions"]
    two = status.status_of(service(), seen(problem=("B", "")), {}, NOW)["conditions"]
    assert [(c.kind, c.reason) for c in status.transitions(one, two)] == [("Warning", "B")]


def test_a_lasting_cause_is_one_warning_and_its_end_a_normal_event() -> None:
    """Ready and Degraded have one cause: its beginning and its end are each reported once."""
    new = status.status_of(service(), seen(ready=0), {}, NOW)["conditions"]
    broken = seen(ready=0, problem=("OOMKilled", "pod p"))
    first = status.status_of(service(), broken, {"conditions": new}, NOW)["conditions"]
    reported = [(c.kind, c.reason) for c in status.transitions(new, first)]
    assert reported == [("Warning", "OOMKilled")]
    again = status.status_of(service(), broken, {"conditions": first}, NOW)["conditions"]
    assert status.transitions(first, again) == []
    mended = status.status_of(service(), seen(ready=0), {"conditions": again}, NOW)["conditions"]
    reported = [(c.kind, c.reason) for c in status.transitions(again, mended)]
    assert reported == [("Normal", "AsExpected")]
