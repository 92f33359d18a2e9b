"""Signals of a model's queue and engines, and pure functions that compute them from metrics.
scrape.py and prometheus.py read the metrics."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace_common.observability import metric_names as metrics

from ..scaling.observation import (
    EngineSignals,
    LowPrioritySignals,
    QueueSignals,
    ScalingObservation,
)
from ..spec.model_service import ModelService

DEFAULT_CAPACITY = 64  # the engine's own default of max_num_seqs
MODEL_LABEL = "gen_ai_request_model"
ENDED = f"{metrics.ENGINE_REQUEST_PHASE_DURATION.prometheus_name}_count"
SPENT = f"{metrics.ENGINE_REQUEST_PHASE_DURATION.prometheus_name}_sum"
SAMPLE_NAMES = frozenset(
    {
        ENDED,
        SPENT,
        metrics.ENGINE_CAPACITY.prometheus_name,
        metrics.ENGINE_KV_BLOCKS.prometheus_name,
        metrics.ENGINE_KV_UTILIZATION.prometheus_name,
        metrics.ENGINE_REQUESTS.prometheus_name,
        metrics.ENGINE_TOKENS.prometheus_name,
        metrics.BATCH_BEHIND.prometheus_name,
        metrics.QUEUE_ADMITTED.prometheus_name,
        metrics.QUEUE_LOW_PRIORITY_ADMITTED.prometheus_name,
        metrics.QUEUE_LOW_PRIORITY_DEPTH.prometheus_name,
        metrics.QUEUE_LOW_PRIORITY_PENDING.prometheus_name,
        metrics.QUEUE_LOW_PRIORITY_TIME_USED.prometheus_name,
        metrics.QUEUE_OTHERS_OLDEST_AGE.prometheus_name,
        metrics.QUEUE_DEPTH.prometheus_name,
        metrics.QUEUE_OLDEST_AGE.prometheus_name,
        metrics.QUEUE_PENDING.prometheus_name,
        metrics.QUEUE_TOKENS.prometheus_name,
    }
)
"""The metrics that are read from a page."""

Labels = Mapping[str, str]
Samples = Mapping[str, Sequence[tuple[Labels, float]]]
"""A metrics page's samples of one model: values and labels by metric name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The signals of one model at `at` (Unix seconds). `cached_blocks` are by pod, if known.

    `problem` is why a pod gave no metrics this time.
    """

    at: float
    queue: QueueSignals | None = None
    engines: EngineSignals | None = None
    cached_blocks: Mapping[str, float] = field(default_factory=dict)
    problem: str | None = None


class SignalSource(Protocol):
    """Where signals come from."""

    async def read(self, service: ModelService, pods: Sequence["PodAddress"]) -> Signals:
        """The newest signals, or older ones if there are no new ones.

        Raises SignalsUnavailable if there never were any.
        """

    def forget(self, key: tuple[str, str]) -> None:
        """Forgets the deleted ModelService (namespace, name)."""


@dataclass(frozen=True, slots=True)
class PodAddress:
    """A pod's metrics endpoint."""

    pod: str
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Running totals of one pod, for rates between two scrapes."""

    at: float
    values: Mapping[str, float]


def observation(
    signals: Signals, *, replicas: int, ready: int, registered: bool = True
) -> ScalingObservation:
    """The observation for `decide`. `replicas` are requested, `ready` serve."""
    return ScalingObservation(
        at=signals.at,
        replicas=replicas,
        ready=ready,
        queue=signals.queue,
        engines=signals.engines,
        registered=registered,
    )


def capacity_of_one(service: ModelService) -> int:
    """A guess of the sequences that one engine runs at once, for engines that do not report it."""
    return service.spec.engine.settings.max_num_seqs or DEFAULT_CAPACITY


def queue_signals(
    pages: Iterable[Samples], arrivals: float | None, low_arrivals: float | None = None
) -> QueueSignals | None:
    """All gateways read the same queue: the maximum over those that answered.

    None where no gateway knows the model. Gateways of older versions do not tell what is of low
    priority.
    """
    depths = [page for page in pages if metrics.QUEUE_DEPTH.prometheus_name in page]
    if not depths:
        return None

    def largest(metric: metrics.Metric) -> float:
        return max((value for page in depths for value in _values(page, metric)), default=0.0)

    return QueueSignals(
        waiting=int(largest(metrics.QUEUE_DEPTH)),
        waiting_tokens=int(largest(metrics.QUEUE_TOKENS)),
        pending=int(largest(metrics.QUEUE_PENDING)),
        oldest_age=largest(metrics.QUEUE_OLDEST_AGE),
        arrival_rate=arrivals,
        low_priority=LowPrioritySignals(
            waiting=int(largest(metrics.QUEUE_LOW_PRIORITY_DEPTH)),
            pending=int(largest(metrics.QUEUE_LOW_PRIORITY_PENDING)),
            arrival_rate=low_arrivals or 0.0,
            time_used=largest(metrics.QUEUE_LOW_PRIORITY_TIME_USED),
            batches_behind=int(largest(metrics.BATCH_BEHIND)),
            others_oldest_age=largest(metrics.QUEUE_OTHERS_OLDEST_AGE),
        )
        if any(metrics.QUEUE_LOW_PRIORITY_DEPTH.prometheus_name in page for page in depths)
        else None,
    )


def engine_signals(
    pages: Sequence[Samples], *, capacity: int, rates: Mapping[str, float]
) -> EngineSignals | None:
    """Sums over the engines that answered; None if none answered.

    `capacity` is the guess for an engine that does not report its own.
    """
    if not pages:
        return None
    running = [sum(_values(page, metrics.ENGINE_REQUESTS, state="running")) for page in pages]
    used = [value for page in pages for value in _values(page, metrics.ENGINE_KV_UTILIZATION)]
    capacities = [_values(page, metrics.ENGINE_CAPACITY) for page in pages]
    return EngineSignals(
        running=int(sum(running)),
        capacity=sum(int(values[0]) if values else capacity for values in capacities),
        kv_utilization=min(1.0, max(0.0, sum(used) / len(used))) if used else 0.0,
        requests_per_second=rates.get("requests"),
        tokens_per_second=rates.get("tokens"),
        output_tokens_per_second=rates.get("output_tokens"),
        prefill_seconds=mean_prefill(rates.get("prefill"), rates.get("requests")),
    )


def cached_blocks(page: Samples) -> float:
    """KV blocks on the device that hold finished prefixes."""
    return sum(_values(page, metrics.ENGINE_KV_BLOCKS, state="cached", place="device"))


def gateway_counters(page: Samples, at: float) -> Counters:
    return Counters(
        at=at,
        values={
            "arrivals": sum(_values(page, metrics.QUEUE_ADMITTED)),
            "low_arrivals": sum(_values(page, metrics.QUEUE_LOW_PRIORITY_ADMITTED)),
        },
    )


def engine_counters(page: Samples, at: float) -> Counters:
    """The counters of an engine; ended requests are counted by their decode phases, one each."""
    ended = [value for labels, value in page.get(ENDED, ()) if labels.get("phase") == "decode"]
    spent = [value for labels, value in page.get(SPENT, ()) if labels.get("phase") == "prefill"]
    return Counters(
        at=at,
        values={
            "tokens": sum(_values(page, metrics.ENGINE_TOKENS)),
            "output_tokens": sum(_values(page, metrics.ENGINE_TOKENS, type="output")),
            "requests": sum(ended),
            "prefill": sum(spent),
        },
    )


def mean_prefill(seconds: float | None, requests: float | None) -> float | None:
    """The mean seconds of a prefill, from the seconds and the requests of the same time."""
    return seconds / requests if seconds is not None and requests else None


def rates(before: Mapping[str, Counters], after: Mapping[str, Counters]) -> Mapping[str, float]:
    """Rates per second by name, summed over pods seen twice.

    A counter that fell was reset with its pod's process, so its value was counted since then.
    """
    total: dict[str, float] = {}
    for pod in before.keys() & after.keys():
        old, new = before[pod], after[pod]
        if new.at <= old.at:
            continue
        for name, value in new.values.items():
            grown = value - old.values.get(name, 0.0)
            rate = (grown if grown >= 0 else value) / (new.at - old.at)
            total[name] = total.get(name, 0.0) + rate
    return total


def _values(page: Samples, metric: metrics.Metric, **wanted: str) -> list[float]:
    return [
        value
        for labels, value in page.get(metric.prometheus_name, ())
        if all(labels.get(label) == text for label, text in wanted.items())
    ]
