"""What scaling remembers between two decisions: starts, learned speeds, wishes, loads.

A value: `learn` and the others return a new one. It survives a restart as JSON; without it, scaling
starts from the policy's guesses and keeps the count it finds.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .forecast import Loads, record_load
from .observation import EngineSignals, Observation
from .policy import ScalingPolicy

LEAST_BUSY = 0.1
"""Below this share of running sequences, an engine's speed says nothing of its speed at load."""
SMOOTHING = 45.0
"""Time constant in seconds of the learned speeds; starts of pods are averaged by count."""
START_WEIGHT = 0.3
LEAST_RATE = 1e-6
"""A second. What is slower was not measured, and to divide by it would ask for endless engines."""

Wish = tuple[float, int]
"""A moment in Unix seconds, and the count wished for, or the change that was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """`starts` are the moments at which the starting replicas were asked for, oldest first.

    Speeds are those of one engine at full load. `highest` and `lowest` are the wishes that can
    still be the extreme of a stabilization window, `changes` the made changes of the count.
    """

    seen_at: float | None = None
    replicas: int | None = None
    ready: int = 0
    active_at: float | None = None
    starts: tuple[float, ...] = ()
    cold_start: float | None = None
    engine_capacity: float | None = None
    engine_requests: float | None = None
    engine_tokens: float | None = None
    busy: float | None = None
    highest: tuple[Wish, ...] = ()
    lowest: tuple[Wish, ...] = ()
    changes: tuple[Wish, ...] = ()
    loads: Loads = ()

    def learn(self, seen: Observation, policy: ScalingPolicy, now: float) -> "History":
        """Takes in what fresh metrics say of starts, speeds and activity.

        After a time without metrics, idle time and stabilization windows begin anew.
        """
        starts, cold_start = self._pods(seen, now)
        blind = self.seen_at is None or now - self.seen_at > 2 * policy.stale_after
        windows = ((now, seen.replicas),) if blind else None
        learned = replace(
            self,
            seen_at=now,
            ready=seen.ready,
            active_at=now if blind or _has_work(seen) else self.active_at,
            highest=windows or self.highest,
            lowest=windows or self.lowest,
            starts=starts,
            cold_start=cold_start,
        )
        if seen.engines is not None and seen.engines.capacity > 0 and seen.ready > 0:
            return learned._speeds(seen.engines, seen.ready, now - (self.seen_at or now))
        return learned

    def _pods(self, seen: Observation, now: float) -> tuple[tuple[float, ...], float | None]:
        """Starts that go on, and the mean cold start with those that have just ended."""
        arrived = min(len(self.starts), max(0, seen.ready - self.ready))
        cold_start = self.cold_start
        for start in self.starts[:arrived]:
            took = now - start
            cold_start = took if cold_start is None else _mix(cold_start, took, START_WEIGHT)
        going = self.starts[arrived:][: seen.starting]
        return (*going, *[now] * (seen.starting - len(going))), cold_start

    def _speeds(self, engines: EngineSignals, ready: int, elapsed: float) -> "History":
        """An engine's speed at full load, from its speed at the present share of capacity."""
        weight = elapsed / (SMOOTHING + elapsed)
        share = engines.running / engines.capacity
        busy = share if self.busy is None else _mix(self.busy, share, weight)
        learned = replace(self, busy=busy, engine_capacity=engines.capacity / ready)
        if busy < LEAST_BUSY:
            return learned
        at_load = 1 / (ready * busy)
        return replace(
            learned,
            engine_requests=_speed(
                self.engine_requests, engines.requests_per_second, at_load, weight
            ),
            engine_tokens=_speed(self.engine_tokens, engines.tokens_per_second, at_load, weight),
        )

    def with_load(self, needed: float, policy: ScalingPolicy, now: float) -> "History":
        """Adds the engines that are needed now to what forecasts look back on."""
        if policy.forecast is None:
            return replace(self, loads=()) if self.loads else self
        return replace(self, loads=record_load(self.loads, now, needed, policy.forecast.days))

    def with_wish(self, wanted: int, current: int, policy: ScalingPolicy, now: float) -> "History":
        """Adds a wish, and a change of the count that was made since the last decision."""
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
            highest=_extremes(self.highest, wanted, now, policy.scale_down.stabilization_window, 1),
            lowest=_extremes(self.lowest, wanted, now, policy.scale_up.stabilization_window, -1),
        )

    def decided(self, replicas: int, now: float) -> "History":
        """After a decision: the count that it set."""
        known = replicas if self.replicas is None else self.replicas
        if replicas == known:
            return self
        change = (now, replicas - known)
        return replace(self, replicas=replicas, changes=(*self.changes, change))

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "History":
        """Raises ValueError where the text is not a history. Unknown fields are passed over."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a history is a JSON object, not {type(values).__name__}")
        names = {field.name for field in fields(cls)}
        return cls(**{name: _tuples(value) for name, value in values.items() if name in names})


def _has_work(seen: Observation) -> bool:
    """Now, or since the last look: short requests come and go between two."""
    queue, engines = seen.queue, seen.engines
    values: list[float | None] = []
    if engines is not None:
        values += [engines.running, engines.tokens_per_second]
    if queue is not None:
        values += [queue.waiting, queue.pending, queue.arrival_rate]
    return any(value is not None and value > 0 for value in values)


def _mix(old: float, new: float, weight: float) -> float:
    return old + (new - old) * weight


def _speed(old: float | None, rate: float | None, at_load: float, weight: float) -> float | None:
    if rate is None or rate < LEAST_RATE:
        return old
    new = rate * at_load
    return new if old is None else _mix(old, new, weight)


def _extremes(
    wishes: tuple[Wish, ...], wanted: int, now: float, window: float, sign: int
) -> tuple[Wish, ...]:
    """Wishes of the window that no later one outdoes: the first is the window's extreme."""
    kept = [wish for wish in wishes if now - wish[0] < window and sign * wish[1] > sign * wanted]
    return (*kept, (now, wanted))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
