"""What metrics say of a model's queue and engines: values, and how they are put together.

Pure. Where the metrics come from is the business of scrape.py and prometheus.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace_common import metric_names as metrics

from .scaling.observation import EngineSignals, Observation, QueueSignals
from .spec import ModelService

DEFAULT_CAPACITY = 64  # the engine's own default of max_num_seqs
MODEL_LABEL = "gen_ai_request_model"
ENDED = f"{metrics.ENGINE_REQUEST_PHASE_DURATION.prometheus_name}_count"
SAMPLE_NAMES = frozenset(
    {
        ENDED,
        metrics.ENGINE_CAPACITY.prometheus_name,
        metrics.ENGINE_KV_BLOCKS.prometheus_name,
        metrics.ENGINE_KV_UTILIZATION.prometheus_name,
        metrics.ENGINE_REQUESTS.prometheus_name,
        metrics.ENGINE_TOKENS.prometheus_name,
        metrics.QUEUE_ADMITTED.prometheus_name,
        metrics.QUEUE_DEPTH.prometheus_name,
        metrics.QUEUE_OLDEST_AGE.prometheus_name,
        metrics.QUEUE_PENDING.prometheus_name,
        metrics.QUEUE_TOKENS.prometheus_name,
    }
)
"""All that is read of a metrics page."""

Labels = Mapping[str, str]
Samples = Mapping[str, Sequence[tuple[Labels, float]]]
"""A metrics page: values and labels by metric name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """`at` is when they were true, Unix seconds. `cached_blocks` by pod, where it is known.

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
        """The newest signals; older ones where there are no new ones. Raises SignalsUnavailable
        where there never were any."""

    def forget(self, key: tuple[str, str]) -> None:
        """The ModelService (namespace, name) is gone."""


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
) -> Observation:
    """What `decide` looks at. `replicas` are asked for, `ready` serve."""
    return Observation(
        at=signals.at,
        replicas=replicas,
        ready=ready,
        queue=signals.queue,
        engines=signals.engines,
        registered=registered,
    )


def capacity_of_one(service: ModelService) -> int:
    """Sequences that one engine runs at once, for engines that do not tell: a guess."""
    return service.spec.engine.settings.max_num_seqs or DEFAULT_CAPACITY


def queue_signals(
    pages: Iterable[Samples], model: str, arrivals: float | None
) -> QueueSignals | None:
    """All gateways read the same queue: the maximum over those that answered.

    None where no gateway knows the model.
    """
    depths = [page for page in pages if _values(page, metrics.QUEUE_DEPTH.prometheus_name, model)]
    if not depths:
        return None

    def largest(metric: metrics.Metric) -> float:
        found = [v for page in depths for v in _values(page, metric.prometheus_name, model)]
        return max(found, default=0.0)

    return QueueSignals(
        waiting=int(largest(metrics.QUEUE_DEPTH)),
        waiting_tokens=int(largest(metrics.QUEUE_TOKENS)),
        pending=int(largest(metrics.QUEUE_PENDING)),
        oldest_age=largest(metrics.QUEUE_OLDEST_AGE),
        arrival_rate=arrivals,
    )


def engine_signals(
    pages: Sequence[Samples], model: str, *, capacity: int, rates: Mapping[str, float] | None
) -> EngineSignals | None:
    """Sums over the engines that answered; `capacity` is the guess for one that does not tell its
    own. None where none answered."""
    running = [
        sum(_values(page, metrics.ENGINE_REQUESTS.prometheus_name, model, state="running"))
        for page in pages
    ]
    used = [
        value
        for page in pages
        for value in _values(page, metrics.ENGINE_KV_UTILIZATION.prometheus_name, model)
    ]
    if not pages:
        return None
    rates = rates or {}
    told = [_values(page, metrics.ENGINE_CAPACITY.prometheus_name, model) for page in pages]
    return EngineSignals(
        running=int(sum(running)),
        capacity=sum(int(values[0]) if values else capacity for values in told),
        kv_utilization=min(1.0, max(0.0, sum(used) / len(used))) if used else 0.0,
        requests_per_second=rates.get("requests"),
        tokens_per_second=rates.get("tokens"),
    )


def cached_blocks(page: Samples, model: str) -> float:
    """KV blocks on the device that hold finished prefixes."""
    name = metrics.ENGINE_KV_BLOCKS.prometheus_name
    return sum(_values(page, name, model, state="cached", place="device"))


def gateway_counters(page: Samples, model: str, at: float) -> Counters:
    admitted = sum(_values(page, metrics.QUEUE_ADMITTED.prometheus_name, model))
    return Counters(at=at, values={"arrivals": admitted})


def engine_counters(page: Samples, model: str, at: float) -> Counters:
    """Ended requests are counted by their decode phase, which each has once."""
    return Counters(
        at=at,
        values={
            "tokens": sum(_values(page, metrics.ENGINE_TOKENS.prometheus_name, model)),
            "requests": sum(_values(page, ENDED, model, phase="decode")),
        },
    )


def rates(
    before: Mapping[str, Counters], after: Mapping[str, Counters]
) -> Mapping[str, float] | None:
    """Per second, summed over pods seen twice; None where none was.

    A counter that fell began anew with its pod's process: what it has now came since.
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
    return total or None


def _values(page: Samples, name: str, model: str, **labels: str) -> list[float]:
    wanted = {MODEL_LABEL: model, **labels}
    return [
        value
        for found, value in page.get(name, ())
        if all(found.get(label) == text for label, text in wanted.items())
    ]
