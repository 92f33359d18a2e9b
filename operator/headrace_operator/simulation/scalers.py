"""Who decides the count in a simulation: the product's `decide`, a constant, or HPA's algorithm."""

from collections import deque
from math import ceil
from typing import Protocol

from headrace_operator.scaling import History, Observation, Reason, ScalingPolicy, decide

HPA_WINDOW = 300.0
"""Seconds that HPA looks back on before it scales down, its default."""
HPA_TOLERANCE = 0.1


class Scaler(Protocol):
    """`interval` seconds pass between calls; the answer is the count to set."""

    name: str
    interval: float

    def replicas(self, seen: Observation, now: float) -> int: ...


class FixedScaler:
    """A fleet that nobody scales."""

    interval = 15.0

    def __init__(self, name: str, replicas: int) -> None:
        self.name = name
        self._replicas = replicas

    def replicas(self, seen: Observation, now: float) -> int:
        return self._replicas


class HeadraceScaler:
    """The operator's own decision, as often as the operator makes it by default."""

    interval = 5.0

    def __init__(self, name: str, policy: ScalingPolicy) -> None:
        self.name = name
        self.reasons: dict[Reason, int] = {}
        self._policy = policy
        self._history = History()

    def replicas(self, seen: Observation, now: float) -> int:
        decision = decide(seen, self._policy, self._history, now)
        self._history = decision.history
        if decision.replicas != seen.replicas:
            self.reasons[decision.reason] = self.reasons.get(decision.reason, 0) + 1
        return decision.replicas


class HpaScaler:
    """HorizontalPodAutoscaler v2 on a utilization, with its defaults.

    ceil(replicas * utilization / target), nothing within the tolerance; pods that are not ready are
    left out and, before scaling up, counted as idle; up at most the double or 4 pods in 15 seconds,
    down after 5 minutes to the highest recommendation of those. The utilization is the mean share
    of running sequences over the last 30 seconds: like CPU, it ends at 1 whatever waits.
    kubernetes.io, "Horizontal Pod Autoscaling", algorithm details.
    """

    interval = 15.0

    def __init__(self, name: str, *, target: float, lowest: int, highest: int) -> None:
        self.name = name
        self._target = target
        self._bounds = (max(1, lowest), highest)
        self._samples: deque[float] = deque(maxlen=2)
        self._wishes: deque[tuple[float, int]] = deque()

    def replicas(self, seen: Observation, now: float) -> int:
        current = seen.replicas
        if not self._wishes:
            self._wishes.append((now, current))
        engines = seen.engines
        if engines is None or engines.capacity == 0:
            return current
        self._samples.append(engines.running / engines.capacity)
        wish = self._wish(sum(self._samples) / len(self._samples), current, seen.ready)
        self._wishes.append((now, wish))
        while now - self._wishes[0][0] > HPA_WINDOW:
            self._wishes.popleft()
        if wish <= current:
            wish = min(current, max(each for _, each in self._wishes))
        lowest, highest = self._bounds
        return min(highest, max(lowest, min(wish, max(2 * current, current + 4))))

    def _wish(self, utilization: float, current: int, ready: int) -> int:
        ratio = utilization / self._target
        if abs(ratio - 1) <= HPA_TOLERANCE:
            return current
        if ratio > 1 and ready < current:
            ratio *= ready / current  # those that start count as idle
            if ratio <= 1 + HPA_TOLERANCE:
                return current
            return ceil(ratio * current)
        return ceil(ratio * ready)
