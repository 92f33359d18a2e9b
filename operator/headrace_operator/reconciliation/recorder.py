"""The operator's own metrics: engines, decisions and their signals, starts, reconciliations."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opentelemetry.metrics import Meter, Observation

from headrace_common.observability import metric_names as metrics
from headrace_common.observability.instruments import counter, histogram, observed_gauge

from ..scaling.signals import Estimate
from ..spec.model_service import ModelService
from .engine_pods import Engine
from .status import Observations

Key = tuple[str, str]
Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class _State:
    """The values of one ModelService's gauges."""

    labels: Labels
    desired: int
    ready: int
    estimates: tuple[Estimate, ...]


class Recorder:
    """The operator's metrics: reconciliations write, exporters read on their threads."""

    def __init__(self, meter: Meter) -> None:
        self._decisions = counter(meter, metrics.OPERATOR_DECISIONS)
        self._reconciles = counter(meter, metrics.OPERATOR_RECONCILES)
        self._cold_starts = histogram(meter, metrics.OPERATOR_COLD_START_DURATION)
        self._lock = threading.Lock()
        self._states: dict[Key, _State] = {}
        self._started: dict[Key, set[tuple[str, str]]] = {}
        observed_gauge(meter, metrics.OPERATOR_REPLICAS, self._replicas)
        observed_gauge(meter, metrics.OPERATOR_SIGNAL, self._signals)
        observed_gauge(meter, metrics.OPERATOR_SIGNAL_TARGET, self._targets)

    def record(self, service: ModelService, seen: Observations) -> None:
        """Records what a reconciliation found and decided; signals only if there were any."""
        decision, labels = seen.decision, _labels(service.namespace, service.served_name)
        estimates = () if decision is None else decision.estimates
        with self._lock:
            self._states[service.key] = _State(labels, seen.desired, seen.ready, estimates)
        if decision is not None:
            self._decisions.add(1, {**labels, metrics.REASON: decision.reason.value})

    def record_starts(self, service: ModelService, engines: Sequence[Engine]) -> None:
        """Measures each engine once, when it is first seen ready; again once it has a new pod.

        Engines that are ready at the first reconciliation are not measured: they may have been
        ready before.
        """
        ready = {each.made: each for each in engines if each.ready}
        known = self._started.setdefault(service.key, set(ready))
        for made in ready.keys() - known:
            if (took := ready[made].start_duration) is not None:
                labels = _labels(service.namespace, service.served_name)
                self._cold_starts.record(took, labels)
        present = {each.made for each in engines}
        self._started[service.key] = (known & present) | ready.keys()

    def reconciled(self, key: Key, *, ok: bool) -> None:
        """Counts a reconciliation; labels it with the object's name if the model is unknown."""
        with self._lock:
            state = self._states.get(key)
        labels = _labels(*key) if state is None else state.labels
        self._reconciles.add(1, {**labels, metrics.RESULT: "ok" if ok else "error"})

    def forget(self, key: Key) -> None:
        self._started.pop(key, None)
        with self._lock:
            self._states.pop(key, None)

    def _known(self) -> list[_State]:
        with self._lock:
            return list(self._states.values())

    def _replicas(self) -> Iterable[Observation]:
        for state in self._known():
            yield Observation(state.desired, {**state.labels, metrics.KIND: "desired"})
            yield Observation(state.ready, {**state.labels, metrics.KIND: "ready"})

    def _signals(self) -> Iterable[Observation]:
        for state in self._known():
            for each in state.estimates:
                yield Observation(each.value, {**state.labels, metrics.SIGNAL: each.signal.value})

    def _targets(self) -> Iterable[Observation]:
        """The gauges of targets; a target of 0 is unknown and left out."""
        for state in self._known():
            for each in state.estimates:
                if each.target > 0:
                    labels = {**state.labels, metrics.SIGNAL: each.signal.value}
                    yield Observation(each.target, labels)


def _labels(namespace: str, model: str) -> Labels:
    return {metrics.REQUEST_MODEL: model, metrics.K8S_NAMESPACE: namespace}
