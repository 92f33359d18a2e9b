"""The scalers of a simulation: the product's `decide`, constant or planned counts, HPA's algorithm,
KEDA's rule."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
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


class PlannedScaler:
    """Counts that were planned before the run: (time, count) in order, the first for time 0."""

    interval = 5.0

    def __init__(self, name: str, plan: Sequence[tuple[float, int]]) -> None:
        self.name = name
        self._times = [at for at, _ in plan]
        self._counts = [count for _, count in plan]

    def replicas(self, seen: ScalingObservation, now: float) -> int:
        return self._counts[bisect_right(self._times, now) - 1]


class HeadraceScaler:
    """The operator's own decision, at its interval for models that have work."""

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


class HpaPace:
    """The defaults of HorizontalPodAutoscaler v2's `behavior`, within bounds.

    It scales up at most to the double or by 4 pods in 15 seconds, and down to the highest
    recommendation of the last 5 minutes.
    """

    def __init__(self, lowest: int, highest: int) -> None:
        self._bounds = (max(1, lowest), highest)
        self._recommendations: deque[tuple[float, int]] = deque()

    def count(self, recommendation: int, current: int, now: float) -> int:
        """The count to set now, where a metric recommends another one."""
        recommendations = self._recommendations
        if not recommendations:
            recommendations.append((now, current))
        recommendations.append((now, recommendation))
        while now - recommendations[0][0] > HPA_WINDOW:
            recommendations.popleft()
        if recommendation <= current:
            recommendation = min(current, max(each for _, each in recommendations))
        lowest, highest = self._bounds
        return min(highest, max(lowest, min(recommendation, max(2 * current, current + 4))))


class HpaScaler:
    """HorizontalPodAutoscaler v2 on a utilization, with its defaults.

    The recommendation is ceil(replicas * utilization / target), and no change within the tolerance.
    Pods that are not ready are left out and, before scaling up, counted as idle. The utilization is
    the mean share of running sequences over the last 30 seconds: like CPU, it ends at 1 whatever
    waits. kubernetes.io, "Horizontal Pod Autoscaling", algorithm details.
    """

    interval = 15.0

    def __init__(self, name: str, *, target: float, lowest: int, highest: int) -> None:
        self.name = name
        self._target = target
        self._pace = HpaPace(lowest, highest)
        self._samples: deque[float] = deque(maxlen=2)

    def replicas(self, seen: ScalingObservation, now: float) -> int:
        current, engines = seen.replicas, seen.engines
        if engines is None or engines.capacity == 0:
            return current
        self._samples.append(engines.running / engines.capacity)
        utilization = sum(self._samples) / len(self._samples)
        return self._pace.count(self._recommend(utilization, current, seen.ready), current, now)

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


class KedaScaler:
    """KEDA's rule for a queue: waiting plus running requests, divided by a target for each engine.

    KEDA gives the number to an HPA as an external metric with an average value, so the HPA's
    tolerance and pace apply, but nothing else is known of pods. The operator makes such a
    ScaledObject in `scaling.mode` keda.
    """

    interval = 15.0

    def __init__(self, name: str, *, target: float, lowest: int, highest: int) -> None:
        self.name = name
        self._target = target
        self._pace = HpaPace(lowest, highest)

    def replicas(self, seen: ScalingObservation, now: float) -> int:
        current, queue = seen.replicas, seen.queue
        if queue is None or current == 0:
            return current
        needed = (queue.waiting + queue.pending) / self._target
        within = abs(needed / current - 1) <= HPA_TOLERANCE
        return self._pace.count(current if within else ceil(needed), current, now)
