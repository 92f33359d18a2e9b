"""`decide`: the replica count of a model, and why it is that."""

from dataclasses import dataclass, replace
from math import ceil

from .history import History
from .limits import highest_allowed, lowest_allowed, stabilized
from .observation import Observation, QueueSignals
from .policy import ScalingPolicy
from .reason import Limit, Reason, Signal
from .signals import Estimate, forecast_estimate, steady_estimates, urgent_estimates

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
"""Real numbers of replicas this close above a whole one are that one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`replicas` is the count to set; `wanted` the one that signals ask for, without limits.

    `limited` names what kept them apart. `frozen`: the metrics were no basis, the count stays.
    `message` is for people. `history` goes into the next call.
    """

    replicas: int
    wanted: int
    reason: Reason
    message: str
    history: History
    limited: Limit | None = None
    frozen: bool = False
    estimates: tuple[Estimate, ...] = ()


@dataclass(frozen=True, slots=True)
class _Wish:
    replicas: int
    reason: Reason


def decide(
    observation: Observation, policy: ScalingPolicy, history: History, now: float
) -> Decision:
    """The count for now. Without fresh metrics it stays, but for the policy's bounds.

    `history` is the last decision's, or History(). `now` is Unix seconds and never goes back.
    """
    if not observation.registered:
        return _introduce(observation, policy, history, now)
    queue = observation.queue
    if observation.at < now - policy.stale_after:
        return _freeze(observation, policy, history, Reason.STALE_METRICS)
    if queue is None or (observation.ready > 0 and observation.engines is None):
        return _freeze(observation, policy, history, Reason.MISSING_METRICS)
    history = history.learn(observation, policy, now)
    steady = steady_estimates(observation, policy, history)
    history = history.with_load(_most(steady), policy, now)
    steady += forecast_estimate(policy, history, now)
    urgent = urgent_estimates(observation, queue, policy, history, now)
    wish = _wish(observation, queue, policy, history, (steady, urgent), now)
    history = history.with_wish(wish.replicas, observation.replicas, policy, now)
    return _limited(observation, policy, history, wish, (*steady, *urgent), now)


def _introduce(seen: Observation, policy: ScalingPolicy, history: History, now: float) -> Decision:
    """Not less than one engine: without it the model stays unknown, so that nobody can ask for it.

    Its metrics are missing for the same reason: no trouble as long as the first engines start.
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


def _freeze(seen: Observation, policy: ScalingPolicy, history: History, reason: Reason) -> Decision:
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


def _wish(
    seen: Observation,
    queue: QueueSignals,
    policy: ScalingPolicy,
    history: History,
    estimates: tuple[tuple[Estimate, ...], tuple[Estimate, ...]],
    now: float,
) -> _Wish:
    """What the signals ask for, before bounds and limits."""
    steady, urgent = estimates
    current = seen.replicas
    working = queue.waiting > 0 or queue.pending > 0
    if _idle(policy, history, now) and _most(steady) < 1:
        return _Wish(0, Reason.IDLE)
    needed = max(_tolerated(_most(steady), current, policy.tolerance), _whole(_most(urgent)))
    if current == 0:
        return _Wish(max(needed, int(working)), Reason.FROM_ZERO if working else _why(steady))
    needed = max(needed, 1)
    if needed > current:
        return _Wish(needed, _why((*steady, *urgent)))
    if needed < current:
        return _Wish(needed, Reason.LOAD_FELL)
    held = seen.starting > 0 and queue.waiting > 0
    return _Wish(current, Reason.STARTING if held else Reason.STEADY)


def _idle(policy: ScalingPolicy, history: History, now: float) -> bool:
    since = history.active_at
    return policy.min_replicas == 0 and since is not None and now - since >= policy.idle_time


def _whole(replicas: float) -> int:
    return ceil(replicas - _ROUNDING)


def _tolerated(needed: float, current: int, tolerance: float) -> int:
    """Up only beyond the tolerance, so that a load on the edge of two counts does not flap."""
    if current < needed <= current * (1 + tolerance):
        return current
    return _whole(needed)


def _why(estimates: tuple[Estimate, ...]) -> Reason:
    """The reason of the estimate that asks for most."""
    if not estimates:
        return Reason.STEADY
    return _REASONS[max(estimates, key=lambda estimate: estimate.replicas).signal]


def _bound(wanted: int, policy: ScalingPolicy) -> Limit | None:
    if wanted > policy.max_replicas:
        return Limit.MAX_REPLICAS
    return Limit.MIN_REPLICAS if wanted < policy.min_replicas else None


def _limited(
    seen: Observation,
    policy: ScalingPolicy,
    history: History,
    wish: _Wish,
    estimates: tuple[Estimate, ...],
    now: float,
) -> Decision:
    """Bounds hold at once; from there the count moves at the policy's pace."""
    current = policy.clamp(seen.replicas)
    bounded = policy.clamp(wish.replicas)
    replicas, held = _paced(current, bounded, policy, history, now)
    reason = wish.reason
    if replicas == current != seen.replicas:
        reason = Reason.BOUNDS
    elif replicas == current and reason in (Reason.LOAD_FELL, Reason.IDLE):
        reason = Reason.STEADY
    return Decision(
        replicas=replicas,
        wanted=wish.replicas,
        reason=reason,
        message=_message(reason, replicas, wish.replicas, estimates),
        history=history.decided(replicas, now),
        limited=held or _bound(wish.replicas, policy),
        estimates=estimates,
    )


def _paced(
    current: int, bounded: int, policy: ScalingPolicy, history: History, now: float
) -> tuple[int, Limit | None]:
    """Stabilization, then step limits. A first request and the end of the idle time wait not."""
    calm = bounded
    if current > 0 and bounded > 0:
        calm = policy.clamp(stabilized(bounded, current, history.highest, history.lowest))
    held = Limit.STABILIZATION if calm != bounded else None
    if calm > current:
        most = highest_allowed(current, policy.scale_up, history.changes, now)
        if most is not None and current == 0:
            most = max(1, most)
        stepped = calm if most is None else min(calm, most)
    else:
        least = lowest_allowed(current, policy.scale_down, history.changes, now)
        stepped = calm if least is None else max(calm, least)
    return stepped, Limit.STEP if stepped != calm else held


def _message(reason: Reason, replicas: int, wanted: int, estimates: tuple[Estimate, ...]) -> str:
    """The sentence of the reason, then the signal that asks for most with its numbers."""
    parts = [reason.sentence]
    top = max(estimates, key=lambda estimate: estimate.replicas, default=None)
    if top is not None and top.replicas > 0:
        parts.append(f"{top.signal.value} is {top.value:.3g}, target {top.target:.3g}.")
    if wanted != replicas:
        parts.append(f"{wanted} wanted, {replicas} set.")
    return " ".join(parts)
