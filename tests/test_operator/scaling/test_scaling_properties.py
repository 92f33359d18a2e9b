"""Properties of `decide` for all observations: bounds and step limits, more load never means fewer
engines, a constant load a constant count, and missing metrics no change.

Values of single signals are in test_scaling.py.
"""

from dataclasses import replace
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_operator.scaling import (
    EngineSignals,
    History,
    QueueSignals,
    Reason,
    ScalingLimit,
    ScalingObservation,
    ScalingPolicy,
    ScalingRules,
    StepKind,
    StepLimit,
    decide,
)

quick = settings(max_examples=60, derandomize=True, deadline=None)

queues = st.builds(
    QueueSignals,
    waiting=st.integers(0, 3000),
    waiting_tokens=st.integers(0, 4_000_000),
    pending=st.integers(0, 3000),
    oldest_age=st.floats(0, 900),
    arrival_rate=st.none() | st.floats(0, 500),
)
policies = st.builds(
    ScalingPolicy,
    min_replicas=st.integers(0, 3),
    max_replicas=st.integers(3, 40),
    drain_time=st.floats(1, 300),
    utilization=st.floats(0.1, 1),
    tolerance=st.floats(0, 0.3),
    engine_requests_per_second=st.none() | st.floats(0.01, 50),
)


@st.composite
def observations(draw: st.DrawFn, at: float = 0.0) -> ScalingObservation:
    replicas = draw(st.integers(0, 40))
    ready = draw(st.integers(0, replicas))
    engines = EngineSignals(
        running=draw(st.integers(0, 32 * ready)),
        capacity=32 * ready,
        kv_utilization=draw(st.floats(0, 1)),
        requests_per_second=draw(st.none() | st.floats(0, 500)),
        tokens_per_second=draw(st.none() | st.floats(0, 500_000)),
    )
    return ScalingObservation(
        at=at,
        replicas=replicas,
        ready=ready,
        queue=draw(queues),
        engines=engines if ready else None,
    )


@quick
@given(st.lists(observations(), min_size=1, max_size=12), policies)
def test_the_count_stays_within_its_bounds(
    seen: list[ScalingObservation], policy: ScalingPolicy
) -> None:
    history = History()
    for step, each in enumerate(seen):
        now = 15.0 * step
        decision = decide(replace(each, at=now), policy, history, now)
        history = decision.history
        assert policy.min_replicas <= decision.replicas <= policy.max_replicas


@quick
@given(observations(), policies, st.integers(1, 2000), st.integers(0, 2_000_000))
def test_more_backlog_never_gives_fewer_engines(
    seen: ScalingObservation, policy: ScalingPolicy, requests: int, tokens: int
) -> None:
    queue = seen.queue
    assert queue is not None
    longer = replace(
        queue, waiting=queue.waiting + requests, waiting_tokens=queue.waiting_tokens + tokens
    )

    few = decide(seen, policy, History(), 0.0)
    many = decide(replace(seen, queue=longer), policy, History(), 0.0)

    assert many.wanted >= few.wanted
    assert many.replicas >= few.replicas


@quick
@given(observations(), policies, st.floats(60.1, 10_000))
def test_stale_metrics_freeze_the_count(
    seen: ScalingObservation, policy: ScalingPolicy, age: float
) -> None:
    decision = decide(seen, policy, History(), seen.at + age)

    assert decision.frozen
    assert decision.reason is Reason.STALE_METRICS
    assert decision.replicas == policy.clamp(seen.replicas)
    assert decision.history == History()


@quick
@given(observations(), policies)
def test_missing_metrics_freeze_the_count(seen: ScalingObservation, policy: ScalingPolicy) -> None:
    decision = decide(replace(seen, queue=None), policy, History(), seen.at)

    assert decision.frozen
    assert decision.reason is Reason.MISSING_METRICS
    assert decision.replicas == policy.clamp(seen.replicas)


@quick
@given(
    st.floats(0.1, 60),
    st.floats(0.3, 3),
    st.integers(0, 30),
    st.floats(20, 200),
    st.floats(0.3, 0.9),
)
def test_a_constant_load_does_not_flap(
    load: float, speed: float, begin: int, cold_start: float, utilization: float
) -> None:
    """For every load, engine speed and first count, the count stops changing."""
    policy = ScalingPolicy(max_replicas=200, utilization=utilization)
    counts = replay(policy, load, speed, begin, cold_start, seconds=7200)
    settled = counts[len(counts) // 2 :]

    assert len(set(settled)) == 1
    assert settled[-1] * speed > load or settled[-1] == 200
    assert turns(counts) <= 3


@quick
@given(
    st.lists(st.integers(0, 3000), min_size=8, max_size=25),
    st.sampled_from(StepKind),
    st.integers(1, 120),
    st.sampled_from([15.0, 60.0, 120.0]),
)
def test_the_count_changes_by_at_most_one_step_in_a_period(
    waiting: list[int], kind: StepKind, value: int, period: float
) -> None:
    rules = ScalingRules(0.0, (StepLimit(kind, value, period),))
    policy = ScalingPolicy(
        max_replicas=500, scale_up=rules, scale_down=rules, engine_requests_per_second=1.0
    )
    history, count, counts = History(), 5, [5]
    for step, each in enumerate(waiting):
        now = 15.0 * step
        decision = decide(without_load(now, count, waiting=each), policy, history, now)
        history, count = decision.history, decision.replicas
        counts.append(count)

    span = int(period / 15)
    for index in range(len(counts)):
        for later in counts[index + 1 : index + 1 + span]:
            ups, downs = allowed(kind, value, max(counts[index : index + span + 1]), counts[index])
            assert later <= ups
            assert later >= downs or later >= counts[index]


def allowed(kind: StepKind, value: int, highest: int, begin: int) -> tuple[int, int]:
    """The highest and lowest count after one period that began with `begin`.

    A count that was reached in the period, `highest`, may be reached again.
    """
    if kind is StepKind.PODS:
        return max(highest, begin + value), begin - value
    return max(highest, ceil(begin * (1 + value / 100))), int(begin * (1 - value / 100)) - 1


@quick
@given(policies, st.integers(1, 3000))
def test_a_first_request_wakes_a_model_at_zero(policy: ScalingPolicy, waiting: int) -> None:
    policy = replace(policy, min_replicas=0, scale_up=ScalingRules(600.0, policy.scale_up.policies))
    seen = ScalingObservation(at=0.0, replicas=0, ready=0, queue=QueueSignals(waiting=waiting))

    decision = decide(seen, policy, History(), 0.0)

    assert decision.replicas >= 1
    assert decision.reason is Reason.FROM_ZERO


@quick
@given(st.integers(1, 12), st.floats(60, 1200))
def test_an_idle_model_goes_to_zero_and_not_before(begin: int, idle_time: float) -> None:
    policy = ScalingPolicy(min_replicas=0, max_replicas=20, idle_time=idle_time)
    history, count, emptied = History(), begin, None
    for step in range(400):
        now = 15.0 * step
        decision = decide(without_load(now, count), policy, history, now)
        history, count = decision.history, decision.replicas
        if count == 0 and emptied is None:
            emptied = now
            assert decision.reason is Reason.IDLE

    assert count == 0
    assert emptied is not None
    assert emptied >= idle_time


@quick
@given(st.lists(observations(), min_size=1, max_size=8), policies)
def test_a_history_survives_a_restart(
    seen: list[ScalingObservation], policy: ScalingPolicy
) -> None:
    history = History()
    for step, each in enumerate(seen):
        history = decide(replace(each, at=15.0 * step), policy, history, 15.0 * step).history

    assert History.from_json(history.to_json()) == history


@quick
@given(observations(), policies)
def test_a_count_that_differs_from_the_wanted_one_names_its_limit(
    seen: ScalingObservation, policy: ScalingPolicy
) -> None:
    decision = decide(seen, policy, History(), seen.at)

    assert (decision.replicas == decision.wanted) or isinstance(decision.limited, ScalingLimit)


def without_load(now: float, count: int, waiting: int = 0) -> ScalingObservation:
    """Ready engines without running requests; `waiting` requests are in the queue."""
    engines = EngineSignals(running=0, capacity=32 * count)
    return ScalingObservation(
        at=now,
        replicas=count,
        ready=count,
        queue=QueueSignals(waiting=waiting),
        engines=engines if count else None,
    )


def replay(
    policy: ScalingPolicy, load: float, speed: float, begin: int, cold_start: float, seconds: int
) -> list[int]:
    """Counts while `load` requests a second arrive.

    Each engine runs 32 sequences and finishes `speed` requests a second.
    """
    history, counts, starts, backlog = History(), [begin], [0.0] * begin, 0.0
    for step in range(seconds // 15):
        now = 15.0 * step
        ready = sum(now - start >= cold_start or start == 0.0 for start in starts)
        done = min(ready * speed, load + backlog / 15)
        backlog = max(0.0, backlog + (load - done) * 15)
        busy = done / (ready * speed) if ready else 0.0
        engines = EngineSignals(
            running=round(busy * 32 * ready),
            capacity=32 * ready,
            kv_utilization=busy / 2,
            requests_per_second=done,
            tokens_per_second=done * 500,
        )
        queue = QueueSignals(
            waiting=int(backlog),
            waiting_tokens=int(backlog) * 500,
            oldest_age=backlog / load,
            arrival_rate=load,
        )
        seen = ScalingObservation(
            at=now,
            replicas=len(starts),
            ready=ready,
            queue=queue,
            engines=engines if ready else None,
        )
        decision = decide(seen, policy, history, now)
        history = decision.history
        counts.append(decision.replicas)
        starts = [*starts, *[now] * (decision.replicas - len(starts))][: decision.replicas]
    return counts


def turns(counts: list[int]) -> int:
    """The number of changes from rising to falling or back."""
    signs = [b > a for a, b in zip(counts, counts[1:], strict=False) if a != b]
    return sum(a != b for a, b in zip(signs, signs[1:], strict=False))
