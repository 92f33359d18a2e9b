"""The state of scaling between two decisions: starts, learned speeds, recommendations, loads.

It is immutable: `learn` and the other methods return a new one. It survives a restart as JSON;
without it, scaling starts from the policy's guesses and keeps the count it finds.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from math import sqrt
from typing import Any

from .forecast import Loads, record_load
from .observation import EngineSignals, ScalingObservation
from .pace import Pace, learned_pace
from .policy import ScalingPolicy

LEAST_BUSY = 0.1
"""Below this share of running sequences, an engine's speed does not predict its speed at load."""
SMOOTHING = 45.0
"""Time constant in seconds of the learned speeds; starts of pods are averaged by count."""
START_WEIGHT = 0.3
SURGE_SMOOTHING = 10.0
"""Time constant in seconds of the arrival rate that finds surges."""
READING = 5.0
"""Seconds over which a measured arrival rate is a mean; half of them add to the smoothing."""
_FAST, _SLOW = SURGE_SMOOTHING + READING / 2, SMOOTHING + READING / 2
SURGE_NOISE = (_SLOW - _FAST) ** 2 / (2 * _FAST * _SLOW * (_FAST + _SLOW))
"""The variance of the difference between the two smoothed rates of independent arrivals, divided by
the rate."""
LEAST_RATE = 1e-6
"""Per second. A slower speed is not valid; dividing by it would request too many engines."""

RateAtShare = tuple[float, float]
"""Two means over the same time: what an engine did per second, and the share of its sequences that
ran."""
TimedCount = tuple[float, int]
"""A moment in Unix seconds, and the recommended count or the change that was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Data that scaling has learned about one model, and its latest recommendations and changes.

    `starts` are the moments at which the starting replicas were requested, oldest first.
    `started_at` is the moment at which a start last ended with a ready engine.
    `engine_requests` and `engine_tokens` are the speeds per second of one engine at full load; they
    follow from `request_rate` and `token_rate`. `pace` is what it needs for a token. `arrivals` is
    the smoothed number of requests admitted per second, `surge` the same over the last seconds.
    `highest` and `lowest` are the recommendations that can still be the extreme of a stabilization
    window; `changes` are the changes of the count that were made.
    """

    seen_at: float | None = None
    replicas: int | None = None
    ready: int = 0
    active_at: float | None = None
    starts: tuple[float, ...] = ()
    started_at: float | None = None
    cold_start: float | None = None
    engine_capacity: float | None = None
    engine_requests: float | None = None
    engine_tokens: float | None = None
    request_rate: RateAtShare | None = None
    token_rate: RateAtShare | None = None
    pace: Pace = Pace()
    arrivals: float | None = None
    surge: float | None = None
    highest: tuple[TimedCount, ...] = ()
    lowest: tuple[TimedCount, ...] = ()
    changes: tuple[TimedCount, ...] = ()
    loads: Loads = ()

    def learn(
        self,
        seen: ScalingObservation,
        policy: ScalingPolicy,
        now: float,
        arrival_rate: float | None,
    ) -> "History":
        """Learns starts, speeds, activity and the arrivals that count from fresh metrics.

        After a time without metrics, idle time and stabilization windows start again.
        """
        blind = self.seen_at is None or now - self.seen_at > 2 * policy.stale_after
        windows = ((now, seen.replicas),) if blind else None
        learned = replace(
            self._pods(seen, now),
            seen_at=now,
            ready=seen.ready,
            active_at=now if blind or _has_work(seen) else self.active_at,
            highest=windows or self.highest,
            lowest=windows or self.lowest,
        )
        elapsed = 0.0 if self.seen_at is None else now - self.seen_at
        if arrival_rate is not None:
            learned = learned._arrivals(arrival_rate, elapsed)
        if seen.engines is not None and seen.engines.capacity > 0 and seen.ready > 0:
            return learned._speeds(seen.engines, seen.ready, elapsed)
        return learned

    def _arrivals(self, rate: float, elapsed: float) -> "History":
        if self.arrivals is None or self.surge is None:
            return replace(self, arrivals=rate, surge=rate)
        return replace(
            self,
            arrivals=_mix(self.arrivals, rate, elapsed / (SMOOTHING + elapsed)),
            surge=_mix(self.surge, rate, elapsed / (SURGE_SMOOTHING + elapsed)),
        )

    def arrivals_ahead(self, ahead: float) -> float | None:
        """Requests per second expected `ahead` seconds from now; None if none were measured.

        The smoothed rate. If the rate of the last seconds is above it by more than one standard
        deviation of noise, the excess counts, and is continued as a straight line up to twice the
        rate.
        """
        if self.arrivals is None or self.surge is None:
            return None
        rise = (SURGE_SMOOTHING + ahead) / (SMOOTHING - SURGE_SMOOTHING)
        noise = sqrt(max(self.arrivals, LEAST_RATE) * SURGE_NOISE)
        excess = max(0.0, self.surge - self.arrivals - noise)
        return self.arrivals + min(excess * (1 + rise), excess + self.surge)

    def _pods(self, seen: ScalingObservation, now: float) -> "History":
        """Learns the present starts, and the mean cold start including those that have just
        ended."""
        arrived = min(len(self.starts), max(0, seen.ready - self.ready))
        cold_start = self.cold_start
        for start in self.starts[:arrived]:
            took = now - start
            cold_start = took if cold_start is None else _mix(cold_start, took, START_WEIGHT)
        going = self.starts[arrived:][: seen.starting]
        return replace(
            self,
            starts=(*going, *[now] * (seen.starting - len(going))),
            started_at=now if arrived else self.started_at,
            cold_start=cold_start,
        )

    def _speeds(self, engines: EngineSignals, ready: int, elapsed: float) -> "History":
        """Learns the speeds of an engine at full load, from what it does at the present load."""
        weight = elapsed / (SMOOTHING + elapsed)
        share = engines.running / engines.capacity
        requests = _rate_at_share(
            self.request_rate, engines.requests_per_second, ready, share, weight
        )
        tokens = _rate_at_share(self.token_rate, engines.tokens_per_second, ready, share, weight)
        return replace(
            self,
            engine_capacity=engines.capacity / ready,
            pace=learned_pace(self.pace, engines, ready, elapsed),
            request_rate=requests,
            token_rate=tokens,
            engine_requests=_speed(self.engine_requests, requests),
            engine_tokens=_speed(self.engine_tokens, tokens),
        )

    def with_load(self, needed: float, policy: ScalingPolicy, now: float) -> "History":
        """Adds the engines that are needed now to the loads for forecasts."""
        if policy.forecast is None:
            return replace(self, loads=()) if self.loads else self
        return replace(self, loads=record_load(self.loads, now, needed, policy.forecast.days))

    def with_recommendation(
        self, wanted: int, current: int, policy: ScalingPolicy, now: float
    ) -> "History":
        """Adds a recommendation, and any change of the count since the last decision."""
        known = current if self.replicas is None else self.replicas
        longest = max(
            (limit.period for limit in (*policy.scale_up.policies, *policy.scale_down.policies)),
            default=0.0,
        )
        changes = tuple(change for change in self.changes if now - change[0] < longest)
        if current != known:
            changes = (*changes, (now, current - known))
        return replace(
            self,
            replicas=current,
            changes=changes,
            highest=_extremes(self.highest, wanted, now, policy.scale_down.window, 1),
            lowest=_extremes(self.lowest, wanted, now, policy.scale_up.window, -1),
        )

    def decided(self, replicas: int, now: float) -> "History":
        """Notes the count that a decision set."""
        known = replicas if self.replicas is None else self.replicas
        if replicas == known:
            return self
        change = (now, replicas - known)
        return replace(self, replicas=replicas, changes=(*self.changes, change))

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "History":
        """A history from JSON; unknown fields are ignored. Raises ValueError for other texts."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a history is a JSON object, not {type(values).__name__}")
        names = {field.name for field in fields(cls)}
        known = {name: _tuples(value) for name, value in values.items() if name in names}
        known["pace"] = Pace(**known.get("pace", {}))
        return cls(**known)


def _has_work(seen: ScalingObservation) -> bool:
    """Whether there is work now or was since the last observation, such as short requests."""
    queue, engines = seen.queue, seen.engines
    values: list[float | None] = []
    if engines is not None:
        values += [engines.running, engines.tokens_per_second]
    if queue is not None:
        values += [queue.waiting, queue.pending, queue.arrival_rate]
    return any(value is not None and value > 0 for value in values)


def _mix(old: float, new: float, weight: float) -> float:
    return old + (new - old) * weight


def _rate_at_share(
    old: RateAtShare | None, total: float | None, ready: int, share: float, weight: float
) -> RateAtShare | None:
    """The means with a new reading: the `total` per second of all engines, at this share."""
    if total is None or total < LEAST_RATE:
        return old
    rate = total / ready
    if old is None:
        return rate, share
    return _mix(old[0], rate, weight), _mix(old[1], share, weight)


def _speed(old: float | None, means: RateAtShare | None) -> float | None:
    """The speed at full load: the mean rate by the mean share, so that both have the same load."""
    if means is None or means[1] < LEAST_BUSY:
        return old
    rate, share = means
    return rate / share


def _extremes(
    recommendations: tuple[TimedCount, ...], wanted: int, now: float, window: float, sign: int
) -> tuple[TimedCount, ...]:
    """The window's recommendations that no later one exceeds; the first is the extreme."""
    kept = [
        (at, count)
        for at, count in recommendations
        if now - at < window and sign * count > sign * wanted
    ]
    return (*kept, (now, wanted))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
