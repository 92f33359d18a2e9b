"""Estimates replica counts from each signal, before tolerance, bounds and limits.

Arrivals and running sequences give the need of a steady load. The backlog gives the need to catch
up, including the engines that are starting. Age and KV cache find cases that these miss.
"""

from dataclasses import dataclass
from math import ceil

from .forecast import forecast_load
from .history import History
from .objective import MeasuredLoad, utilization_for
from .observation import QueueSignals, ScalingObservation
from .policy import ScalingPolicy
from .reason import Signal

STALLED = 2.0
"""A start that takes this many times the usual duration no longer delays further starts."""
TOKEN_EXCESS = 2.0
"""The token backlog counts at most this many times that of as many requests of usual length, as
clients declare much more output than they get."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A signal's `value` and `target`, and the `replicas` that it needs, as a real number."""

    signal: Signal
    value: float
    target: float
    replicas: float


@dataclass(frozen=True, slots=True)
class _Work:
    """Work in requests or tokens: waiting, arriving per second, done per second by one engine."""

    backlog: float
    arriving: float
    speed: float


def target_utilization(policy: ScalingPolicy, history: History) -> float:
    """The policy's target, or the one that its objective needs at the expected load."""
    speed, capacity = history.engine_requests, history.engine_capacity
    arriving = history.arrivals_ahead(history.cold_start or policy.cold_start)
    if policy.objective is None or not speed or not capacity or not arriving:
        return policy.utilization
    load = MeasuredLoad(
        running=arriving * capacity / speed,
        capacity=capacity,
        service=capacity / speed,
        pace=history.pace,
    )
    return utilization_for(policy.objective, load)


def steady_estimates(
    seen: ScalingObservation, policy: ScalingPolicy, history: History
) -> tuple[Estimate, ...]:
    """The engines that the present load needs if it continues, and those that a surge of arrivals
    needs one cold start from now."""
    found = []
    queue, engines = seen.queue, seen.engines
    speed = history.engine_requests or policy.engine_requests_per_second
    arriving = history.arrivals_ahead(history.cold_start or policy.cold_start)
    if queue is not None and arriving is not None and speed:
        target = speed * policy.utilization
        found.append(Estimate(Signal.ARRIVALS, arriving, target, arriving / target))
    if engines is not None and engines.capacity > 0:
        # Not smoothed: the window for scaling down forgets a short peak, and a rise is urgent.
        share = engines.running / engines.capacity
        needed = seen.ready * share / policy.utilization
        found.append(Estimate(Signal.RUNNING, share, policy.utilization, needed))
        full, most = engines.kv_utilization, policy.kv_utilization
        found.append(Estimate(Signal.KV_UTILIZATION, full, most, seen.ready * full / most))
    return tuple(found)


def urgent_estimates(
    seen: ScalingObservation,
    queue: QueueSignals,
    policy: ScalingPolicy,
    history: History,
    now: float,
) -> tuple[Estimate, ...]:
    """The further engines that waiting work needs; 0 if the present and starting ones are
    enough."""
    found = []
    arriving = history.arrivals_ahead(0.0) or 0.0
    speed = history.engine_requests or policy.engine_requests_per_second
    if speed:
        work = _Work(queue.waiting, arriving, speed)
        found.append(_backlog(Signal.BACKLOG_REQUESTS, work, seen, policy, history, now))
    elif queue.waiting:
        found.append(_backlog_by_capacity(seen, queue, policy, history))
    if speed and history.engine_requests and history.engine_tokens:
        usual = history.engine_tokens / history.engine_requests
        backlog = min(queue.waiting_tokens, TOKEN_EXCESS * usual * queue.waiting)
        work = _Work(backlog, arriving * usual, history.engine_tokens)
        found.append(_backlog(Signal.BACKLOG_TOKENS, work, seen, policy, history, now))
    found.append(_age(seen, queue, policy, history, now))
    return tuple(found)


def forecast_estimate(policy: ScalingPolicy, history: History, now: float) -> tuple[Estimate, ...]:
    if policy.forecast is None:
        return ()
    ahead = (history.cold_start or policy.cold_start) + policy.forecast.lead
    needed = forecast_load(history.loads, now, ahead, policy.forecast.days)
    return (Estimate(Signal.FORECAST, needed, needed, needed),)


def _backlog(
    signal: Signal,
    work: _Work,
    seen: ScalingObservation,
    policy: ScalingPolicy,
    history: History,
    now: float,
) -> Estimate:
    """The engines that drain the backlog within the drain time once they have started.

    Value and target are seconds: how long the present engines would need, and the drain time.
    """
    drain, cold_start = policy.drain_time, history.cold_start or policy.cold_start
    starts = [max(0.0, start + cold_start - now) for start in history.starts]
    value = work.backlog / (work.speed * max(1, seen.ready))
    missing = work.backlog > 0 and _left(work, seen.ready, starts, drain) > 0
    if not missing:
        return Estimate(signal, value, drain, 0.0)
    left = _left(work, seen.ready, starts, drain + cold_start)
    extra = max(0.0, left) / (work.speed * drain)
    return Estimate(signal, value, drain, seen.replicas + extra)


def _left(work: _Work, ready: int, starts: list[float], horizon: float) -> float:
    """The work left after `horizon` seconds of the present engines and those that start then."""
    seconds = ready * horizon + sum(max(0.0, horizon - start) for start in starts)
    return work.backlog + work.arriving * horizon - work.speed * seconds


def _backlog_by_capacity(
    seen: ScalingObservation, queue: QueueSignals, policy: ScalingPolicy, history: History
) -> Estimate:
    """The backlog's estimate if speeds are unknown: the engines that could run all work at once, or
    one if their size is unknown."""
    running = seen.engines.running if seen.engines is not None else 0
    size = history.engine_capacity
    needed = (running + queue.waiting) / (size * policy.utilization) if size else 1.0
    return Estimate(Signal.BACKLOG_REQUESTS, queue.waiting, size or 0.0, needed)


def _age(
    seen: ScalingObservation,
    queue: QueueSignals,
    policy: ScalingPolicy,
    history: History,
    now: float,
) -> Estimate:
    """The age's estimate: a tenth more engines, at least one, unless starting engines may still
    help, or one has just started and the metrics may not show yet what it took."""
    age, most = queue.oldest_age, policy.max_age
    if queue.waiting == 0 or age <= most:
        return Estimate(Signal.OLDEST_AGE, age, most, 0.0)
    cold_start = history.cold_start or policy.cold_start
    starting = any(now - start < STALLED * cold_start for start in history.starts)
    started = history.started_at is not None and now - history.started_at < most
    extra = 0 if starting or started else max(1, ceil(seen.replicas / 10))
    return Estimate(Signal.OLDEST_AGE, age, most, float(seen.replicas + extra))
