"""The operator's metrics, read from its metrics page."""

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import Metric

from headrace_common.observability.telemetry import Telemetry, setup
from headrace_operator.desired.workloads import WorkloadKind
from headrace_operator.reconciliation.engine_pods import Engine, engines
from headrace_operator.reconciliation.recorder import Recorder
from headrace_operator.reconciliation.status import Observations
from headrace_operator.scaling.decision import Decision
from headrace_operator.scaling.history import History
from headrace_operator.scaling.reason import Reason, Signal
from headrace_operator.scaling.signals import Estimate
from headrace_testing.kubernetes import pod, set_pod
from headrace_testing.model_services import service
from headrace_testing.telemetry import scrape, value

WHERE = {"k8s_namespace_name": "models", "gen_ai_request_model": "qwen"}
KEY = ("models", "qwen")
AGE = Estimate(Signal.OLDEST_AGE, 12.0, 10.0, 3.0)
UNSIZED = Estimate(Signal.BACKLOG_REQUESTS, 7.0, 0.0, 1.0)


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    opened = setup("operator", metrics_port=0)
    yield opened
    opened.shutdown()


def seen(*estimates: Estimate, reason: Reason = Reason.OLDEST_AGE) -> Observations:
    decision = Decision(
        replicas=3, wanted=3, reason=reason, message="", history=History(), estimates=estimates
    )
    return Observations(replicas=2, ready=2, updated=2, desired=3, decision=decision)


def page(telemetry: Telemetry) -> dict[str, Metric]:
    assert telemetry.server is not None
    return scrape(telemetry.server.url)


def started(name: str, at: str = "2026-01-01T00:01:30Z") -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True", "lastTransitionTime": at}
    return pod(name, "qwen", conditions=[condition])


def test_counts_and_signals_carry_the_model_and_its_namespace(telemetry: Telemetry) -> None:
    Recorder(telemetry.meter).record(service(), seen(AGE, UNSIZED))
    found = page(telemetry)
    assert value(found, "headrace_operator_replicas", kind="desired", **WHERE) == 3
    assert value(found, "headrace_operator_replicas", kind="ready", **WHERE) == 2
    reason = Reason.OLDEST_AGE.value
    assert value(found, "headrace_operator_decisions_total", reason=reason, **WHERE) == 1
    signal = Signal.OLDEST_AGE.value
    assert value(found, "headrace_operator_signal", signal=signal, **WHERE) == 12
    assert value(found, "headrace_operator_signal_target", signal=signal, **WHERE) == 10


def test_an_unknown_target_is_not_exported(telemetry: Telemetry) -> None:
    Recorder(telemetry.meter).record(service(), seen(UNSIZED))
    found = page(telemetry)
    assert value(found, "headrace_operator_signal") == 7
    assert "headrace_operator_signal_target" not in found


def test_signals_that_cannot_be_read_and_models_that_are_gone_vanish(telemetry: Telemetry) -> None:
    recorder = Recorder(telemetry.meter)
    recorder.record(service(), seen(AGE))
    recorder.record(service(), seen(reason=Reason.MISSING_METRICS))
    assert "headrace_operator_signal" not in page(telemetry)
    recorder.forget(KEY)
    assert "headrace_operator_replicas" not in page(telemetry)


def test_reconciliations_are_counted_by_result(telemetry: Telemetry) -> None:
    recorder = Recorder(telemetry.meter)
    recorder.reconciled(KEY, ok=False)
    recorder.record(service(model={"local": {"path": "/m"}, "servedName": "Qwen"}), seen())
    recorder.reconciled(KEY, ok=True)
    found, name = page(telemetry), "headrace_operator_reconciles_total"
    assert value(found, name, result="error", gen_ai_request_model="qwen") == 1
    assert value(found, name, result="ok", gen_ai_request_model="Qwen") == 1


def singles(*pods: dict[str, Any]) -> list[Engine]:
    return engines(pods, WorkloadKind.DEPLOYMENT, 1)


def test_a_cold_start_is_measured_once(telemetry: Telemetry) -> None:
    recorder = Recorder(telemetry.meter)
    starting = pod("new", "qwen", ready=False)
    recorder.record_starts(service(), singles(started("old"), starting))
    for _ in range(2):
        recorder.record_starts(service(), singles(started("old"), started("new")))
    recorder.record_starts(service(), singles(started("new", "2026-01-01T05:00:00Z")))
    found, name = page(telemetry), "headrace_operator_cold_start_duration_seconds"
    assert value(found, f"{name}_count", **WHERE) == 1
    assert value(found, f"{name}_sum", **WHERE) == 90


def test_an_engine_of_several_pods_is_one_cold_start_and_another_after_it_lost_a_pod(
    telemetry: Telemetry,
) -> None:
    recorder = Recorder(telemetry.meter)
    first, second = set_pod("qwen", 0, 0, ready=False), set_pod("qwen", 0, 1, ready=False)

    def look() -> None:
        found = engines([first, second], WorkloadKind.STATEFUL_SET, 2)
        recorder.record_starts(service(), found)

    def become_ready(pod: dict[str, Any], at: str) -> None:
        pod["status"]["conditions"] = [
            {"type": "Ready", "status": "True", "lastTransitionTime": f"2026-01-01T{at}Z"}
        ]

    look()
    become_ready(first, "00:01:00")
    look()
    become_ready(second, "00:01:10")
    look()
    found, name = page(telemetry), "headrace_operator_cold_start_duration_seconds"
    assert value(found, f"{name}_count", **WHERE) == 1
    assert value(found, f"{name}_sum", **WHERE) == 70
    second["metadata"]["creationTimestamp"] = "2026-01-01T02:00:00Z"
    become_ready(first, "02:00:30")
    become_ready(second, "02:00:20")
    look()
    found = page(telemetry)
    assert value(found, f"{name}_count", **WHERE) == 2
    assert value(found, f"{name}_sum", **WHERE) == 100
