"""The operator's own metrics: wanted and ready engines, decisions by reason."""

import threading
from collections.abc import Iterable

from opentelemetry.metrics import Meter, Observation

from headrace_common import metric_names as metrics
from headrace_common.instruments import counter, observed_gauge

from .spec import ModelService
from .status import Seen

Key = tuple[str, str]


class Recorder:
    """Written by reconciliations, read by exporters on their threads."""

    def __init__(self, meter: Meter) -> None:
        self._decisions = counter(meter, metrics.OPERATOR_DECISIONS)
        self._lock = threading.Lock()
        self._replicas: dict[Key, tuple[str, int, int]] = {}
        observed_gauge(meter, metrics.OPERATOR_REPLICAS, self._observe)

    def record(self, service: ModelService, seen: Seen) -> None:
        with self._lock:
            self._replicas[service.key] = service.served_name, seen.desired, seen.ready
        if seen.decision is not None:
            labels = {
                metrics.REQUEST_MODEL: service.served_name,
                metrics.REASON: seen.decision.reason.value,
            }
            self._decisions.add(1, labels)

    def forget(self, key: Key) -> None:
        with self._lock:
            self._replicas.pop(key, None)

    def _observe(self) -> Iterable[Observation]:
        with self._lock:
            known = list(self._replicas.values())
        for model, desired, ready in known:
            for kind, value in (("desired", desired), ("ready", ready)):
                yield Observation(value, {metrics.REQUEST_MODEL: model, metrics.KIND: kind})
