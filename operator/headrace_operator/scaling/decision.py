"""`decide`: the replica count of a model, and the reason for it."""

from dataclasses import dataclass, replace
from math import ceil

from .history import History
from .limits import highest_allowed, lowest_allowed, stabilized
from .observation import QueueSignals, ScalingObservation
from .policy import ScalingPolicy
from .reason import Reason, ScalingLimit, Signal
from .signals import (
    Estimate,
    forecast_estimate,
    steady_estimates,
    target_utilization,
    urgent_estimates,
)

_REASONS = {
    Signal.ARRIVALS: Reason.ARRIVALS,
    Signal.RUNNING: Reason.RUNNING,
    Signal.KV_UTILIZATION: Reason.KV_UTILIZATION,
    Signal.BACKLOG_REQUESTS: Reason.BACKLOG,
    Signal.BACKLOG_TOKENS: Reason.BACKLOG,
    Signal.OLDEST_AGE: Reason.OLDEST_AGE,
    Signal.FORECAST: Reason.FORECAST,
}
_ROUNDING = 1e-6
"""A replica count this little above a whole number is rounded down to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision. `replicas` is the count to set; `wanted` the recommended one without limits.

    `limited` names the limit between them. `frozen`: there were no usable metrics, so the count
    stays. `message` is for people. `history` goes into the next call.
    """

    replicas: int
    wanted: int
    reason: Reason
    message: str
    history: History
    limited: ScalingLimit | None = None
    frozen: bool = False
    estimates: tuple[Estimate, ...] = ()


@dataclass(frozen=True, slots=True)
class _Recommendation:
    replicas: int
    reason: Reason


def decide(
    observation: ScalingObservation, policy: ScalingPolicy, history: History, now: float
) -> Decision:
    """The count for now. Without fresh metrics it stays, within the policy's bounds.

    `history` is the last decision's, or History(). `now` is Unix seconds and never goes back.
    """
    if not observation.registered:
        return _introduce(observation, policy, history, now)
    queue = observation.queue
    if observation.at < now - policy.stale_after:
        return _freeze(observation, policy, history, Reason.STALE_METRICS)
    if queue is None or (observation.ready > 0 and observation.engines is None):
        return _freeze(observation, policy, history, Reason.MISSING_METRICS)
    # Engines are as fast with any work; how many are needed depends on the work that counts.
    counted = observation.without_low_priority() if policy.low_priority_yields else observation
    assert counted.queue is not None, "a queue without some of its requests is a queue"
    history = history.learn(observation, policy, now, counted.queue.arrival_rate)
    policy = policy.for_cold_start(history.cold_start or policy.cold_start)
    policy = replace(policy, utilization=target_utilization(policy, history))
    steady = steady_estimates(counted, policy, history)
    history = history.with_load(_most(steady), policy, now)
    steady += forecast_estimate(policy, history, now)
    urgent = urgent_estimates(counted, counted.queue, policy, history, now)
    recommendation = _recommend(observation, queue, policy, history, (steady, urgent), now)
    history = history.with_recommendation(
        recommendation.replicas, observation.replicas, policy, now
    )
    return _limited(observation, policy, history, recommendation, (*steady, *urgent), now)


def _introduce(
    seen: ScalingObservation, policy: ScalingPolicy, history: History, now: float
) -> Decision:
    """At least one engine for an unregistered model, which clients could otherwise not request.

    Its metrics are missing for the same reason, which does not matter while the first engines
    start.
    """
    least = max(1, policy.min_replicas)
    known = replace(seen, registered=True)
    decision = decide(known, replace(policy, min_replicas=least), history, now)
    expected = decision.frozen or least != policy.min_replicas
    if decision.replicas > least or not expected:
        return decision
    reason = Reason.INITIAL_SCALE
    return replace(
        decision, wanted=least, reason=reason, message=reason.sentence, limited=None, frozen=False
    )


def _freeze(
    seen: ScalingObservation, policy: ScalingPolicy, history: History, reason: Reason
) -> Decision:
    replicas = policy.clamp(seen.replicas)
    return Decision(
        replicas=replicas,
        wanted=seen.replicas,
        reason=reason,
        message=reason.sentence,
        history=history,
        limited=_bound(seen.replicas, policy),
        frozen=True,
    )


def _most(estimates: tuple[Estimate, ...]) -> float:
    return max((estimate.replicas for estimate in estimates), default=0.0)


def _recommend(
    seen: ScalingObservation,
    queue: QueueSignals,
    policy: ScalingPolicy,
    history: History,
    estimates: tuple[tuple[Estimate, ...], tuple[Estimate, ...]],
    now: float,
) -> _Recommendation:
    """The count that the signals recommend, before bounds and limits."""
    steady, urgent = estimates
    current = seen.replicas
    working = queue.waiting > 0 or queue.pending > 0
    if _idle(policy, history, now) and _most(steady) < 1:
        return _Recommendation(0, Reason.IDLE)
    needed = max(_tolerated(_most(steady), current, policy.tolerance), _whole(_most(urgent)))
    if current == 0:
        return _Recommendation(
            max(needed, int(working)), Reason.FROM_ZERO if working else _why(steady)
        )
    needed = max(needed, 1)
    if needed > current:
        return _Recommendation(needed, _why((*steady, *urgent)))
    if needed < current:
        return _Recommendation(needed, Reason.LOAD_FELL)
    if queue.waiting == 0:
        return _Recommendation(current, Reason.STEADY)
    return _Recommendation(current, Reason.STARTING if seen.starting > 0 else Reason.CATCHING_UP)


def _idle(policy: ScalingPolicy, history: History, now: float) -> bool:
    since = history.active_at
    return policy.min_replicas == 0 and since is not None and now - since >= policy.idle_time


def _whole(replicas: float) -> int:
    return ceil(replicas - _ROUNDING)


def _tolerated(needed: float, current: int, tolerance: float) -> int:
    """Rises only above the tolerance, so that a load between two counts does not oscillate."""
    if current < needed <= current * (1 + tolerance):
        return current
    return _whole(needed)


def _why(estimates: tuple[Estimate, ...]) -> Reason:
    """The reason of the highest estimate."""
    if not estimates:
        return Reason.STEADY
    return _REASONS[max(estimates, key=lambda estimate: estimate.replicas).signal]


def _bound(wanted: int, policy: ScalingPolicy) -> ScalingLimit | None:
    if wanted > policy.max_replicas:
        return ScalingLimit.MAX_REPLICAS
    return ScalingLimit.MIN_REPLICAS if wanted < policy.min_replicas else None


def _limited(
    seen: ScalingObservation,
    policy: ScalingPolicy,
    history: History,
    recommendation: _Recommendation,
    estimates: tuple[Estimate, ...],
    now: float,
) -> Decision:
    """Applies bounds immediately; within them the count moves at the policy's pace."""
    current = policy.clamp(seen.replicas)
    bounded = policy.clamp(recommendation.replicas)
    replicas, held = _paced(current, bounded, policy, history, now)
    reason = recommendation.reason
    if replicas == current != seen.replicas:
        reason = Reason.BOUNDS
    elif replicas == current and reason in (Reason.LOAD_FELL, Reason.IDLE):
        reason = Reason.STEADY
    return Decision(
        replicas=replicas,
        wanted=recommendation.replicas,
        reason=reason,
        message=_message(reason, replicas, recommendation.replicas, estimates),
        history=history.decided(replicas, now),
        limited=held or _bound(recommendation.replicas, policy),
        estimates=estimates,
    )


def _paced(
    current: int, bounded: int, policy: ScalingPolicy, history: History, now: float
) -> tuple[int, ScalingLimit | None]:
    """Applies stabilization, then step limits; a first request and idleness are not delayed."""
    calm = bounded
    if current > 0 and bounded > 0:
        calm = policy.clamp(stabilized(bounded, current, history.highest, history.lowest))
    held = ScalingLimit.STABILIZATION if calm != bounded else None
    if calm > current:
        most = highest_allowed(current, policy.scale_up, history.changes, now)
        if most is not None and current == 0:
            most = max(1, most)
        stepped = calm if most is None else min(calm, most)
    else:
        least = lowest_allowed(current, policy.scale_down, history.changes, now)
        stepped = calm if least is None else max(calm, least)
    return stepped, ScalingLimit.STEP if stepped != calm else held


def _message(reason: Reason, replicas: int, wanted: int, estimates: tuple[Estimate, ...]) -> str:
    """The sentence of the reason, then the highest signal with its numbers."""
    parts = [reason.sentence]
    top = max(estimates, key=lambda estimate: estimate.replicas, default=None)
    if top is not None and top.replicas > 0:
        parts.append(f"{top.signal.value} is {top.value:.3g}, target {top.target:.3g}.")
    if wanted != replicas:
        parts.append(f"{wanted} wanted, {replicas} set.")
    return " ".join(parts)
