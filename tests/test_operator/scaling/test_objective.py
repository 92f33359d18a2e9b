"""Objectives of latency: the number of engines beside the exact formula of queues, and the pace
that is learned from measurements."""

from dataclasses import replace
from math import exp

import pytest

from headrace_operator.scaling import (
    EngineSignals,
    History,
    Objective,
    PolicyError,
    QueueSignals,
    ScalingObservation,
    ScalingPolicy,
    decide,
)
from headrace_operator.scaling.objective import MeasuredLoad, utilization_for
from headrace_operator.scaling.pace import MEMORY, Pace, learned_pace

CAPACITY = 32.0
SERVICE = 20.0
FIRST = Objective(time_to_first_token=2.0)


def target(objective: Objective, running: float, pace: Pace | None = None) -> float:
    load = MeasuredLoad(
        running=running, capacity=CAPACITY, service=SERVICE, pace=pace or Pace(prefill=0.5)
    )
    return utilization_for(objective, load)


def erlang_waits(servers: int, load: float, patience: float) -> float:
    """The exact share that waits longer than `patience` service times: Erlang's C formula."""
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
    waits = blocked / (1 - load / servers * (1 - blocked))
    return waits * exp(-(servers - load) * patience)


@pytest.mark.parametrize("load", [5.0, 20.0, 60.0, 200.0, 1000.0])
@pytest.mark.parametrize("percentile", [0.9, 0.99])
def test_the_servers_are_about_those_of_the_exact_formula(load: float, percentile: float) -> None:
    servers = load / target(replace(FIRST, percentile=percentile), load)
    patience = (2.0 - 0.5) / SERVICE
    needed = next(
        count
        for count in range(int(load) + 1, 10_000)
        if erlang_waits(count, load, patience) <= 1 - percentile
    )

    assert abs(servers - needed) <= max(2.0, 0.01 * needed)


def test_larger_loads_and_looser_objectives_allow_fuller_engines() -> None:
    loads = [target(FIRST, load) for load in (10.0, 40.0, 160.0, 640.0)]
    patient = [target(Objective(time_to_first_token=wait), 40.0) for wait in (1.0, 2.0, 20.0)]
    certain = [target(replace(FIRST, percentile=share), 40.0) for share in (0.999, 0.99, 0.9)]

    for rising in (loads, patient, certain):
        assert rising == sorted(rising)
        assert len(set(rising)) == len(rising)
        assert all(0 < share < 1 for share in rising)


def measured(
    *sequences: float,
    base: float = 0.02,
    slope: float = 0.001,
    before: Pace | None = None,
    elapsed: float = 5.0,
) -> Pace:
    """Measurements of two engines whose tokens take base + slope * sequences."""
    pace = before or Pace()
    for count in sequences:
        rate = count / (base + slope * count)
        engines = EngineSignals(
            running=round(2 * count),
            capacity=64,
            output_tokens_per_second=2 * rate,
            prefill_seconds=0.3,
        )
        pace = learned_pace(pace, engines, 2, elapsed)
    return pace


def test_the_pace_of_an_engine_is_learned_from_different_loads() -> None:
    pace = measured(4, 9, 17, 25, 12)

    assert pace.line() == pytest.approx((0.02, 0.001))
    assert pace.sequences_at(0.05) == pytest.approx(30)
    assert pace.sequences_at(0.01) == 1.0
    assert pace.prefill == pytest.approx(0.3)


def test_with_one_load_alone_a_token_takes_time_in_proportion_to_the_sequences() -> None:
    pace = measured(*[20] * 5)

    assert pace.sequences_at(0.08) == pytest.approx(40)


def test_an_engine_that_does_not_slow_down_may_run_any_number() -> None:
    assert measured(4, 9, 17, slope=0.0).sequences_at(0.03) > 1e6
    assert measured(4, 9, 17, slope=-0.0005).sequences_at(0.03) > 1e6
    assert Pace().sequences_at(0.03) == float("inf")


def test_old_measurements_are_forgotten() -> None:
    pace = measured(4, 9, 17)
    idle = learned_pace(pace, EngineSignals(running=0, capacity=64), 2, 5.0)
    long_after = measured(25, base=0.04, before=pace, elapsed=1000 * MEMORY)
    slower = measured(4, 9, 17, base=0.04, before=long_after)

    assert idle == pace
    assert slower.sequences_at(0.05) == pytest.approx(10, rel=0.02)


def test_the_time_per_token_limits_the_sequences_of_an_engine() -> None:
    pace = measured(4, 9, 17, 25)
    loose = target(Objective(time_per_output_token=0.06, percentile=0.5), 200.0, pace)
    strict = target(Objective(time_per_output_token=0.036, percentile=0.5), 200.0, pace)

    assert loose == pytest.approx(1.0)
    assert strict == pytest.approx(16 / 32)


def test_the_target_follows_the_objective_once_speeds_are_known() -> None:
    policy = ScalingPolicy(max_replicas=100, objective=FIRST, tolerance=0.0)
    seen = ScalingObservation(
        at=0.0,
        replicas=10,
        ready=10,
        queue=QueueSignals(waiting=0, arrival_rate=10.0),
        engines=EngineSignals(running=200, capacity=320, prefill_seconds=0.5,
                              output_tokens_per_second=5000.0),
    )  # fmt: skip
    known = History(engine_capacity=32.0, engine_requests=1.6)
    unknown = decide(seen, policy, History(), 0.0)
    decision = decide(seen, policy, known, 0.0)

    (arrivals,) = [each for each in decision.estimates if each.signal.value == "arrivals"]
    assert arrivals.replicas == pytest.approx(200 / 32 / target(FIRST, 200.0), rel=0.01)
    (running,) = [each for each in unknown.estimates if each.signal.value == "running"]
    assert running.target == policy.utilization


@pytest.mark.parametrize(
    "wrong",
    [{"percentile": 1.0}, {"time_to_first_token": 0.0}, {"time_per_output_token": -1.0}],
)
def test_a_wrong_objective_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PolicyError, match=next(iter(wrong))):
        Objective(**wrong)
