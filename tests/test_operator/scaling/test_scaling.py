"""The decision of `decide` for each signal, in numbers. General properties are in the property
tests."""

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest

from headrace_operator.scaling import (
    Decision,
    EngineSignals,
    Forecast,
    History,
    LowPrioritySignals,
    PolicyError,
    QueueSignals,
    Reason,
    ScalingLimit,
    ScalingObservation,
    ScalingPolicy,
    ScalingRules,
    Signal,
    StepKind,
    StepLimit,
    decide,
)
from headrace_operator.scaling.history import SMOOTHING, SURGE_NOISE

POLICY = ScalingPolicy(max_replicas=20, utilization=0.5, engine_requests_per_second=1.0)
FREE = ScalingRules(0.0)


def see(
    ready: int,
    *,
    at: float = 0.0,
    replicas: int | None = None,
    share: float = 0.0,
    kv: float = 0.0,
    rate: float | None = None,
    **queue: float,
) -> ScalingObservation:
    """Observations: `share` of the sequences of `ready` engines run; other values describe the
    queue."""
    signals = QueueSignals(
        waiting=int(queue.get("waiting", 0)),
        waiting_tokens=int(queue.get("waiting_tokens", 0)),
        pending=int(queue.get("pending", 0)),
        oldest_age=queue.get("oldest_age", 0.0),
        arrival_rate=queue.get("arrival_rate"),
    )
    engines = EngineSignals(
        running=round(share * 100 * ready),
        capacity=100 * ready,
        kv_utilization=kv,
        requests_per_second=rate,
        tokens_per_second=None if rate is None else rate * 1000,
    )
    return ScalingObservation(
        at=at,
        replicas=ready if replicas is None else replicas,
        ready=ready,
        queue=signals,
        engines=engines if ready else None,
    )


def first(seen: ScalingObservation, policy: ScalingPolicy = POLICY) -> Decision:
    return decide(seen, policy, History(), seen.at)


def test_engines_that_fit_the_load_stay() -> None:
    decision = first(see(4, share=0.5, arrival_rate=2.0))

    assert (decision.replicas, decision.reason, decision.limited) == (4, Reason.STEADY, None)


@pytest.mark.parametrize(
    ("seen", "replicas", "reason"),
    [
        (see(4, share=0.8), 7, Reason.RUNNING),
        (see(4, kv=1.0), 5, Reason.KV_UTILIZATION),
        (see(4, arrival_rate=3.5), 7, Reason.ARRIVALS),
        (see(4, waiting=1, oldest_age=11.0), 5, Reason.OLDEST_AGE),
        (see(4, waiting=230), 5, Reason.BACKLOG),
        (see(0, waiting=1), 1, Reason.FROM_ZERO),
        (see(0, replicas=0, pending=1), 1, Reason.FROM_ZERO),
    ],
)
def test_each_signal_scales_up_for_its_reason(
    seen: ScalingObservation, replicas: int, reason: Reason
) -> None:
    policy = replace(POLICY, min_replicas=0, cold_start=20.0, scale_up=FREE)

    decision = first(seen, policy)

    assert (decision.replicas, decision.reason) == (replicas, reason)


def test_a_backlog_that_the_engines_drain_in_time_adds_none() -> None:
    decision = first(see(4, waiting=120))

    assert (decision.replicas, decision.reason) == (4, Reason.STEADY)


def test_a_backlog_asks_for_enough_engines_to_drain_it() -> None:
    policy = replace(POLICY, cold_start=20.0, scale_up=FREE)

    decision = first(see(4, waiting=300, arrival_rate=2.0), policy)

    # In 50 s: 300 + 100 arrive, 4 engines finish 200; the remaining 200 take 6.7 engines 30 s.
    assert decision.replicas == 4 + 7
    assert decision.reason is Reason.BACKLOG


def test_engines_that_are_starting_count_towards_the_backlog() -> None:
    policy = replace(POLICY, cold_start=20.0, scale_up=FREE)
    seen = see(4, waiting=300, arrival_rate=2.0)
    begun = decide(seen, policy, History(), 0.0)

    later = decide(replace(seen, at=1.0, replicas=begun.replicas), policy, begun.history, 1.0)

    assert later.replicas == begun.replicas
    assert later.reason is Reason.STARTING


def test_a_token_backlog_counts_where_requests_are_few_and_long() -> None:
    policy = replace(POLICY, cold_start=20.0, drain_time=10.0, scale_up=FREE)
    history = first(see(1, share=1.0, rate=1.0), policy).history
    history = decide(see(1, at=15.0, share=1.0, rate=1.0), policy, history, 15.0).history

    few = decide(see(1, at=30.0, waiting=40, waiting_tokens=4_000), policy, history, 30.0)
    long = decide(see(1, at=30.0, waiting=40, waiting_tokens=90_000), policy, history, 30.0)

    assert long.wanted > few.wanted


def test_an_old_request_adds_no_more_engines_while_one_starts() -> None:
    seen = see(4, replicas=5, waiting=1, oldest_age=60.0)

    decision = first(seen)

    assert (decision.replicas, decision.reason) == (5, Reason.STARTING)


def test_an_old_request_adds_no_engine_when_one_has_just_started() -> None:
    starting = first(see(0, replicas=1, waiting=1, oldest_age=11.0))
    started = see(1, at=10.0, waiting=1, oldest_age=21.0)

    soon = decide(started, POLICY, starting.history, 10.0)
    later = decide(replace(started, at=20.0), POLICY, soon.history, 20.0)

    assert (soon.replicas, later.replicas) == (1, 2)
    assert later.reason is Reason.OLDEST_AGE


def test_a_small_deviation_changes_nothing() -> None:
    assert first(see(10, share=0.54)).replicas == 10
    assert first(see(10, share=0.57)).replicas == 12


def test_scaling_down_waits_for_the_window_and_goes_in_steps() -> None:
    history, count, counts = History(cold_start=300.0), 8, []
    for step in range(45):
        now = 15.0 * step
        decision = decide(see(count, at=now, share=0.0625), POLICY, history, now)
        history, count = decision.history, decision.replicas
        counts.append(count)
        if step == 1:
            assert decision.limited is ScalingLimit.STABILIZATION
            assert decision.reason is Reason.STEADY

    assert counts[:20] == [8] * 20
    assert counts[21] == 6
    assert counts[-1] == 1


def test_one_busy_moment_keeps_the_engines_for_a_window() -> None:
    history, counts = History(cold_start=300.0), []
    for step in range(40):
        now = 15.0 * step
        share = 0.5 if step == 15 else 0.05
        seen = see(4, at=now, share=share)
        decision = decide(seen, POLICY, history, now)
        history = replace(decision.history, replicas=4)
        counts.append(decision.replicas)

    assert counts[15:35] == [4] * 20
    assert counts[36] < 4


@pytest.mark.parametrize(("start", "kept"), [(10.0, 50), (200.0, 200), (900.0, 300)])
def test_an_engine_is_kept_as_long_as_a_start_takes_within_bounds(start: float, kept: int) -> None:
    assert kept_seconds(History(cold_start=start)) == kept


def kept_seconds(history: History) -> int:
    """How long four engines stay that are not needed any more, in looks of ten seconds."""
    counts = []
    for now in range(0, 400, 10):
        share = 0.5 if now == 0 else 0.05
        decision = decide(see(4, at=now, share=share), POLICY, history, now)
        history = replace(decision.history, replicas=4)
        counts.append(decision.replicas)

    return 10 * next(step for step, count in enumerate(counts) if count < 4)


def rising(policy: ScalingPolicy, step: float, cold_start: float) -> int:
    """The count that is wanted 30 s after arrivals began to rise by `step` a second every 5 s."""
    history = History(cold_start=cold_start)
    for tick in range(60):
        now, rate = 5.0 * tick, 4.0 + step * max(0, tick - 53)
        decision = decide(see(8, at=now, arrival_rate=rate, share=0.25), policy, history, now)
        history = decision.history
    return decision.wanted


def test_a_surge_is_continued_for_as_long_as_a_start_takes() -> None:
    free = replace(POLICY, scale_down=FREE)

    calm, soon, late = (rising(free, *given) for given in ((0.0, 60), (0.5, 10), (0.5, 60)))

    assert calm == 8
    assert calm < soon < late


def see_batches(
    low: LowPrioritySignals, *, ready: int = 2, share: float = 0.9, **queue: Any
) -> ScalingObservation:
    """Engines that are 90 % full, with these requests of low priority among all."""
    seen = see(ready, share=share, kv=share, **queue)
    assert seen.queue is not None
    return replace(seen, queue=replace(seen.queue, low_priority=low))


FULL = LowPrioritySignals(waiting=500, pending=100, arrival_rate=5.0)
WAITING: dict[str, Any] = {"waiting": 500, "pending": 180, "arrival_rate": 6.0, "oldest_age": 900.0}
YIELDS = replace(POLICY, low_priority_yields=True)


def test_low_priority_that_yields_asks_for_no_engines() -> None:
    """80 of 200 sequences and 1 request a second are of others, which two engines serve."""
    seen = see_batches(FULL, **WAITING)

    assert decide(seen, YIELDS, History(), 0.0).replicas == 2
    assert decide(seen, POLICY, History(), 0.0).replicas > 2


@pytest.mark.parametrize("due", [{"time_used": 0.5}, {"batches_behind": 1}])
def test_low_priority_that_is_due_asks_for_engines(due: dict[str, Any]) -> None:
    seen = see_batches(replace(FULL, **due), **WAITING)

    assert decide(seen, YIELDS, History(), 0.0).replicas > 2
    almost = see_batches(replace(FULL, time_used=0.49), **WAITING)
    assert decide(almost, YIELDS, History(), 0.0).replicas == 2


def test_other_requests_beside_low_priority_ask_for_engines() -> None:
    """The others have waited too long, arrive faster than two engines serve, or fill them."""
    waits = see_batches(replace(FULL, others_oldest_age=11.0), **{**WAITING, "waiting": 501})
    arrives = see_batches(replace(FULL, arrival_rate=3.0), **WAITING)
    runs = see_batches(replace(FULL, pending=20), **WAITING)

    reasons = [decide(seen, YIELDS, History(), 0.0).reason for seen in (waits, arrives, runs)]
    assert reasons == [Reason.OLDEST_AGE, Reason.ARRIVALS, Reason.RUNNING]


def test_low_priority_alone_keeps_one_engine() -> None:
    policy = replace(YIELDS, min_replicas=0, idle_time=10.0)
    low = LowPrioritySignals(waiting=9)
    first = decide(see_batches(low, ready=0, share=0.0, waiting=9), policy, History(), 0.0)
    assert (first.replicas, first.reason) == (1, Reason.FROM_ZERO)

    low = LowPrioritySignals(waiting=500, pending=90, arrival_rate=5.0)
    queue: dict[str, Any] = {"waiting": 500, "pending": 90, "arrival_rate": 5.0}
    history, counts = first.history, []
    for now in (100.0, 200.0, 300.0):
        seen = replace(see_batches(low, ready=1, **queue), at=now)
        decision = decide(seen, policy, history, now)
        history = decision.history
        counts.append(decision.replicas)
    assert counts == [1, 1, 1]


def test_arrivals_within_their_noise_are_no_surge() -> None:
    history = History(arrivals=4.0, surge=4.2)

    assert history.arrivals_ahead(60.0) == 4.0


def test_the_noise_of_a_surge_is_that_of_the_difference_between_two_means_of_arrivals() -> None:
    """Ten independent arrivals a second, counted every five seconds."""
    counts = np.random.default_rng(1).poisson(50.0, 10_000)
    history, differences = History(), []
    for look, count in enumerate(counts):
        now = 5.0 * look
        history = history.learn(see(4, at=now), POLICY, now, count / 5)
        assert history.surge is not None and history.arrivals is not None
        differences.append(history.surge - history.arrivals)

    assert np.std(differences[100:]) == pytest.approx(sqrt(10.0 * SURGE_NOISE), rel=0.05)


def learned(readings: list[tuple[float, float]], *, start: float = 0.0) -> list[History]:
    """The history after each reading of one engine: its share of running sequences, its requests a
    second. Readings are 5 s apart."""
    history, found = History(), []
    for look, (share, rate) in enumerate(readings):
        now = start + 5.0 * look
        history = history.learn(see(1, at=now, share=share, rate=rate), POLICY, now, None)
        found.append(history)
    return found


@pytest.mark.parametrize("idle", [0.02, 0.2])
def test_a_jump_from_idle_changes_no_speed(idle: float) -> None:
    """The engine does a request a second at full load, and less in proportion at other loads."""
    jump = learned([(idle, idle)] * 60 + [(1.0, 1.0)] * 60)[60:]

    assert [history.engine_requests for history in jump] == pytest.approx([1.0] * 60)
    assert [history.engine_tokens for history in jump] == pytest.approx([1000.0] * 60)


def test_speeds_of_engines_without_load_are_not_learned() -> None:
    (*_, history) = learned([(0.02, 0.5)] * 60)
    assert history.engine_requests is None

    (*_, history) = learned([(0.5, 0.5)] * 60 + [(0.02, 0.5)] * 60)
    assert history.engine_requests is not None
    assert history.engine_requests < 10.0


def test_speeds_follow_the_engine() -> None:
    (*_, history) = learned([(0.5, 1.0)] * 60 + [(0.5, 0.25)] * 60)

    assert history.engine_requests == pytest.approx(0.5, rel=0.01)


def test_the_first_seconds_of_a_clock_that_begins_at_0_count() -> None:
    for start in (0.0, 1000.0):
        (*_, history) = learned([(0.0, 1.0), (1.0, 1.0)], start=start)
        assert history.request_rate == pytest.approx((1.0, 5.0 / (SMOOTHING + 5.0)))


def test_steps_up_are_limited_per_period() -> None:
    policy = replace(POLICY, scale_up=ScalingRules(0.0, (StepLimit(StepKind.PODS, 2, 60.0),)))
    history, count, counts = History(), 2, []
    for step in range(9):
        now = 15.0 * step
        seen = see(count, at=now, share=1.0, arrival_rate=18.0)
        decision = decide(seen, policy, history, now)
        history, count = decision.history, decision.replicas
        counts.append(count)

    assert counts == [4, 4, 4, 4, 6, 6, 6, 6, 8]
    assert decision.limited is ScalingLimit.STEP


def test_a_direction_can_be_disabled() -> None:
    still = ScalingRules(0.0, (), "Disabled")
    policy = replace(POLICY, scale_up=still, scale_down=still)

    assert first(see(4, share=1.0), policy).replicas == 4
    assert first(see(4), policy).replicas == 4


def test_bounds_that_changed_hold_at_once() -> None:
    low, high = first(see(1), replace(POLICY, min_replicas=3)), first(see(30, share=0.5))

    assert (low.replicas, low.reason) == (3, Reason.BOUNDS)
    assert (high.replicas, high.reason) == (20, Reason.BOUNDS)


def test_the_decision_names_the_limit_of_replicas() -> None:
    decision = first(see(15, share=1.0), replace(POLICY, scale_up=FREE))

    assert (decision.replicas, decision.wanted) == (20, 30)
    assert decision.limited is ScalingLimit.MAX_REPLICAS
    assert "30 wanted, 20 set" in decision.message


def test_the_cold_start_is_learned_from_the_pods_that_came_up() -> None:
    history = first(see(1, replicas=3)).history
    history = decide(see(3, at=40.0), POLICY, history, 40.0).history

    assert history.cold_start == pytest.approx(40.0)
    assert history.starts == ()


def test_an_engines_speed_is_learned_from_its_throughput_under_load() -> None:
    history = History()
    for step in range(60):
        now = 15.0 * step
        seen = see(4, at=now, share=0.5, rate=6.0, arrival_rate=6.0)
        history = decide(seen, POLICY, history, now).history

    assert history.engine_requests == pytest.approx(3.0, rel=0.01)
    assert history.engine_tokens == pytest.approx(3000.0, rel=0.01)


def test_the_idle_time_restarts_after_a_gap_in_the_metrics() -> None:
    policy = replace(POLICY, min_replicas=0, idle_time=300.0)
    history = first(see(1), policy).history

    back = decide(see(1, at=1000.0), policy, history, 1000.0)

    assert back.replicas == 1
    assert decide(see(1, at=1030.0), policy, back.history, 1030.0).replicas == 1


def test_work_between_two_readings_keeps_the_engine() -> None:
    policy = replace(POLICY, min_replicas=0, idle_time=300.0)
    decision = first(see(1), policy)
    counts = {}
    for now in range(15, 601, 15):
        seen = see(1, at=now, arrival_rate=0.01 if now == 150 else 0.0)
        decision = decide(seen, policy, decision.history, now)
        counts[now] = decision.replicas

    assert min(now for now, count in counts.items() if count == 0) == 450


def test_the_load_of_the_day_before_is_predicted() -> None:
    policy = replace(POLICY, forecast=Forecast(lead=600.0), cold_start=60.0)
    history = History()
    for step in range(2 * 288):
        now = 300.0 * step
        hour = (now / 3600) % 24
        rate = 4.0 if 9 <= hour < 17 else 0.5
        seen = see(8, at=now, arrival_rate=rate, share=rate / 8)
        history = decide(seen, policy, history, now).history
    now = 2 * 86_400 + 8.9 * 3600
    quiet = see(1, at=now, arrival_rate=0.5, share=0.5)

    decision = decide(quiet, policy, history, now)
    without = decide(quiet, replace(policy, forecast=None), history, now)

    assert (decision.wanted, decision.reason) == (8, Reason.FORECAST)
    assert without.wanted == 1


def test_estimates_name_value_and_target() -> None:
    decision = first(see(4, share=0.8))
    (running,) = [each for each in decision.estimates if each.signal is Signal.RUNNING]

    assert (running.value, running.target) == (0.8, 0.5)
    assert running.replicas == pytest.approx(6.4)


def test_a_rate_near_zero_does_not_change_the_estimate() -> None:
    decision = first(
        see(1, share=0.5, rate=5e-324), replace(POLICY, engine_requests_per_second=None)
    )
    busy = see(1, at=15.0, share=0.5, rate=5e-324, waiting=9, arrival_rate=5.0)
    decision = decide(busy, POLICY, decision.history, 15.0)

    assert decision.history.engine_requests is None
    assert decision.replicas <= POLICY.max_replicas


def unknown(ready: int, *, replicas: int | None = None, **queue: float) -> ScalingObservation:
    return replace(see(ready, replicas=replicas, **queue), registered=False)


FROM_ZERO = replace(POLICY, min_replicas=0)


@pytest.mark.parametrize(
    "seen",
    [
        unknown(0),
        unknown(1),
        replace(unknown(0), queue=None),
        replace(unknown(0), at=-1000.0),
        replace(unknown(0, replicas=1), queue=None),
    ],
)
def test_a_model_that_is_not_registered_gets_one_engine(seen: ScalingObservation) -> None:
    decision = decide(seen, FROM_ZERO, History(), 0.0)

    assert (decision.replicas, decision.reason) == (1, Reason.INITIAL_SCALE)
    assert not decision.frozen
    assert decision.limited is None


def test_an_unknown_model_with_a_backlog_scales_like_any_other() -> None:
    decision = first(unknown(1, waiting=230), FROM_ZERO)

    assert decision.replicas > 1
    assert decision.reason is Reason.BACKLOG


def test_a_model_that_keeps_an_engine_needs_no_other_to_be_known() -> None:
    assert first(unknown(1)).reason is Reason.STEADY
    assert first(replace(unknown(3), queue=None)).reason is Reason.MISSING_METRICS
    starting = first(replace(unknown(0, replicas=1), queue=None))
    assert (starting.reason, starting.frozen) == (Reason.INITIAL_SCALE, False)


def test_a_model_that_became_known_idles_to_zero() -> None:
    decision = first(unknown(1), FROM_ZERO)
    counts = {}
    for now in range(15, 601, 15):
        decision = decide(see(1, at=now), FROM_ZERO, decision.history, now)
        counts[now] = decision.replicas

    assert {now for now, count in counts.items() if count == 0} == {600}
    assert decision.reason is Reason.IDLE


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_one_word_with_a_sentence(reason: Reason) -> None:
    assert reason.isalpha()
    assert reason.sentence.endswith(".")


def test_a_policy_out_of_range_names_field_value_and_range() -> None:
    with pytest.raises(PolicyError, match=r"utilization: 1\.5 .* above 0, at most 1"):
        ScalingPolicy(utilization=1.5)
    with pytest.raises(PolicyError, match="max_replicas: 1 "):
        ScalingPolicy(min_replicas=2, max_replicas=1)


def test_an_invalid_history_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON object"):
        History.from_json("[1]")


def test_a_history_from_before_rates_were_stored_keeps_its_speeds_until_there_is_a_rate() -> None:
    text = '{"seen_at": 5.0, "engine_requests": 2.0, "engine_tokens": 900.0, "busy": 0.5}'
    stored = History.from_json(text)
    assert (stored.engine_requests, stored.engine_tokens) == (2.0, 900.0)

    unmeasured = stored.learn(see(1, at=10.0, share=0.5), POLICY, 10.0, None)
    assert (unmeasured.engine_requests, unmeasured.engine_tokens) == (2.0, 900.0)
    measured = unmeasured.learn(see(1, at=15.0, share=0.5, rate=0.6), POLICY, 15.0, None)
    assert (measured.engine_requests, measured.engine_tokens) == pytest.approx((1.2, 1200.0))


def test_a_backlog_before_full_engines_is_seen_at_the_first_check() -> None:
    """The engines' earlier load must not hide that they are full: once it did so for 33 s."""
    policy = replace(POLICY, utilization=0.7, max_replicas=3, engine_requests_per_second=None)
    idle = EngineSignals(running=1, capacity=8, requests_per_second=0.4, tokens_per_second=20.0)
    full = EngineSignals(running=8, capacity=8, requests_per_second=3.2, tokens_per_second=160.0)

    def look(at: float, engines: EngineSignals, waiting: int) -> ScalingObservation:
        queue = QueueSignals(waiting=waiting, waiting_tokens=50 * waiting, arrival_rate=0.4)
        return ScalingObservation(at=at, replicas=2, ready=2, queue=queue, engines=engines)

    before = decide(look(0.0, idle, 0), policy, History(), 0.0)
    decision = decide(look(15.0, full, 16), policy, before.history, 15.0)
    assert (decision.replicas, decision.reason) == (3, Reason.RUNNING)


def test_a_shrinking_backlog_is_not_called_steady() -> None:
    decision = first(see(4, share=0.4, waiting=3, oldest_age=1.0))
    assert (decision.replicas, decision.reason) == (4, Reason.CATCHING_UP)
