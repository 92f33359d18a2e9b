"""The engine's statistics as vLLM's metrics, for `LLM.get_metrics`."""

from collections.abc import Iterator
from dataclasses import dataclass

from headrace_common.observability import metric_names as names

from ..core.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class Metric:
    """A value that the engine counts, under vLLM's name."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that never decreases."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number that may increase and decrease."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Numbers that never decrease, by their position."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Observations by upper limit. An LLM has no metric of this kind."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(stats: SchedulerStats, model: str) -> list[Metric]:
    """The metrics of an engine."""
    labels = {"model_name": model, "engine": "0"}
    return [*_gauges(stats, labels), *_counters(stats, labels)]


def _gauges(stats: SchedulerStats, labels: dict[str, str]) -> Iterator[Metric]:
    yield Gauge(names.VLLM_REQUESTS_RUNNING, labels, stats.running)
    yield Gauge(names.VLLM_REQUESTS_WAITING, labels, stats.waiting)
    yield Gauge(names.VLLM_KV_CACHE_USAGE, labels, stats.kv_utilization)


def _counters(stats: SchedulerStats, labels: dict[str, str]) -> Iterator[Metric]:
    looked_up = stats.prefix_hit_tokens + stats.prefix_miss_tokens
    yield Counter(names.VLLM_PREEMPTIONS, labels, stats.preemptions + stats.swaps)
    yield Counter(names.VLLM_PREFIX_CACHE_QUERIES, labels, looked_up)
    yield Counter(names.VLLM_PREFIX_CACHE_HITS, labels, stats.device_hit_tokens)
    yield Counter(names.VLLM_EXTERNAL_QUERIES, labels, looked_up - stats.device_hit_tokens)
    yield Counter(names.VLLM_EXTERNAL_HITS, labels, stats.external_hit_tokens)
    speculation = stats.speculation
    if speculation is not None:
        yield Counter(names.VLLM_SPEC_DRAFTS, labels, speculation.drafts)
        yield Counter(names.VLLM_SPEC_DRAFT_TOKENS, labels, speculation.draft_tokens)
        yield Counter(names.VLLM_SPEC_ACCEPTED, labels, speculation.accepted_tokens)
        positions = list(speculation.accepted_per_position)
        yield Vector(names.VLLM_SPEC_ACCEPTED_PER_POSITION, labels, positions)
