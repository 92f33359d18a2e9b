"""The scalers of a simulation: the product's `decide`, a constant count, or HPA's algorithm."""

from collections import deque
from math import ceil
from typing import Protocol

from ..scaling import History, Reason, ScalingObservation, ScalingPolicy, decide

HPA_WINDOW = 300.0
"""The default length in seconds of HPA's window before it scales down."""
HPA_TOLERANCE = 0.1


class SimulatedScaler(Protocol):
    """A scaler, called every `interval` seconds; it returns the count to set."""

    name: str
    interval: float

    def replicas(self, seen: ScalingObservation, now: float) -> int: ...


class FixedScaler:
    """A constant count."""

    interval = 15.0

    def __init__(self, name: str, replicas: int) -> None:
        self.name = name
        self._replicas = replicas

    def replicas(self, seen: ScalingObservation, now: float) -> int:
        return self._replicas


class HeadraceScaler:
    """The operator's own decision, at the operator's default interval."""

    interval = 5.0

    def __init__(self, name: str, policy: ScalingPolicy) -> None:
        self.name = name
        self.reasons: dict[Reason, int] = {}
        self._policy = policy
        self._history = History()

    def replicas(self, seen: ScalingObservation, now: float) -> int:
        decision = decide(seen, self._policy, self._history, now)
        self._history = decision.history
        if decision.replicas != seen.replicas:
            self.reasons[decision.reason] = self.reasons.get(decision.reason, 0) + 1
        return decision.replicas


class HpaScaler:
    """HorizontalPodAutoscaler v2 on a utilization, with its defaults.

    The recommendation is ceil(replicas * utilization / target), and no change within the tolerance.
    Pods that are not ready are left out and, before scaling up, counted as idle. It scales up at
    most to the double or by 4 pods in 15 seconds, and down to the highest recommendation of the
    last 5 minutes. The utilization is the mean share of running sequences over the last 30 seconds:
    like CPU, it ends at 1 whatever waits.
    kubernetes.io, "Horizontal Pod Autoscaling", algorithm details.
    """

    interval = 15.0

    def __init__(self, name: str, *, target: float, lowest: int, highest: int) -> None:
        self.name = name
        self._target = target
        self._bounds = (max(1, lowest), highest)
        self._samples: deque[float] = deque(maxlen=2)
        self._recommendations: deque[tuple[float, int]] = deque()

    def replicas(self, seen: ScalingObservation, now: float) -> int:
        current = seen.replicas
        if not self._recommendations:
            self._recommendations.append((now, current))
        engines = seen.engines
        if engines is None or engines.capacity == 0:
            return current
        self._samples.append(engines.running / engines.capacity)
        recommendation = self._recommend(
            sum(self._samples) / len(self._samples), current, seen.ready
        )
        self._recommendations.append((now, recommendation))
        while now - self._recommendations[0][0] > HPA_WINDOW:
            self._recommendations.popleft()
        if recommendation <= current:
            recommendation = min(current, max(each for _, each in self._recommendations))
        lowest, highest = self._bounds
        return min(highest, max(lowest, min(recommendation, max(2 * current, current + 4))))

    def _recommend(self, utilization: float, current: int, ready: int) -> int:
        ratio = utilization / self._target
        if abs(ratio - 1) <= HPA_TOLERANCE:
            return current
        if ratio > 1 and ready < current:
            ratio *= ready / current  # starting pods count as idle
            if ratio <= 1 + HPA_TOLERANCE:
                return current
            return ceil(ratio * current)
        return ceil(ratio * ready)
