"""What an engine measures, and the spans of the requests that went through it.

Fed by the worker, on its event loop; read by exporters, on their threads. A step costs an addition
and, where metrics are exported, three histogram records. Decides nothing.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from opentelemetry.metrics import Meter, Observation
from prometheus_client import Metric as PrometheusMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace_common import metric_names as names
from headrace_common.instruments import counter, histogram, observed_counter, observed_gauge
from headrace_common.messages import GenerateRequest
from headrace_common.protocol.base import Outcome
from headrace_common.telemetry import Telemetry
from headrace_common.tracing import EngineTimes, record_engine_spans, record_step_span

from .lora.use import AdapterUse
from .speculation.stats import SpeculationStats
from .stats import SchedulerStats

STEP_SPAN_INTERVAL = 1000
"""One step in so many becomes a span that links to the requests of its batch."""

_PLACEMENTS = {True: "placed", False: "stolen", None: "unplaced"}


@dataclass(slots=True)
class _Tracked:
    """A request in this engine. Times are Unix nanoseconds."""

    request: GenerateRequest
    attempt: int
    queued_ns: int
    taken_ns: int
    first_step: int
    first_token_ns: int | None = None
    first_token_step: int = 0


class EngineMetrics:
    """Instruments and traces of one engine. Methods are cheap; where nothing is exported, nearly
    free.

    `stats` gives the engine's present state and is read only when an exporter collects, on its
    thread. `capacity` is the most sequences that run at once; `step_age` gives seconds since the
    last finished step while there is work, else 0. `adapters` tells which LoRA adapters are in use.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        model: str,
        engine_id: str,
        block_size: int,
        capacity: int,
        stats: Callable[[], SchedulerStats],
        step_age: Callable[[], float],
        adapters: Callable[[], AdapterUse | None] = lambda: None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._telemetry = telemetry
        self._model = model
        self._engine_id = engine_id
        self._clock_ns = clock_ns
        self._stats = stats
        self._adapters = adapters
        self._steps = 0
        self._input_tokens = 0
        self._output_tokens = 0
        self._tracked: dict[str, _Tracked] = {}
        self._labels = {names.REQUEST_MODEL: model}
        self._make_instruments(telemetry.meter)
        self._observe_all(telemetry.meter, step_age, capacity)
        telemetry.register(_VllmNames(self._snapshot, model, engine_id, block_size))

    def _make_instruments(self, meter: Meter) -> None:
        self._step_duration = histogram(meter, names.ENGINE_STEP_DURATION)
        self._step_tokens = histogram(meter, names.ENGINE_STEP_TOKENS)
        self._phases = histogram(meter, names.ENGINE_REQUEST_PHASE_DURATION)
        self._redeliveries = counter(meter, names.QUEUE_REDELIVERIES)
        self._placements = counter(meter, names.QUEUE_PLACEMENTS)
        self._prefill_labels = {**self._labels, names.PHASE: "prefill"}
        self._decode_labels = {**self._labels, names.PHASE: "decode"}

    # Requests

    def taken(
        self,
        request: GenerateRequest,
        attempt: int = 1,
        placed: bool | None = None,
        waited: float = 0.0,
    ) -> None:
        """The engine has taken a request from the queue; `placed` and `waited` as in Lease."""
        now, waited = self._clock_ns(), max(0.0, waited)
        queued = now - int(waited * 1e9)
        self._tracked[request.request_id] = _Tracked(request, attempt, queued, now, self._steps + 1)
        self._phases.record(waited, {**self._labels, names.PHASE: "queue"})
        if attempt > 1:
            self._redeliveries.add(1, self._labels)
        else:
            self._placements.add(1, {**self._labels, names.RESULT: _PLACEMENTS[placed]})

    def compiled(self, seconds: float) -> None:
        """A request waited so long for what its output must match."""
        self._phases.record(seconds, {**self._labels, names.PHASE: "compile"})

    def produced(self, request_id: str, tokens: int) -> None:
        """A step made output tokens for a request."""
        self._output_tokens += tokens
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.first_token_ns is None:
            tracked.first_token_ns = self._clock_ns()
            tracked.first_token_step = self._steps
            self._input_tokens += len(tracked.request.prompt_token_ids)

    def ended(self, request: GenerateRequest, outcome: Outcome) -> None:
        """A request has its outcome: its durations and its spans are written now."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        times = self._times(tracked)
        self._record_phases(times)
        if self._telemetry.tracing:
            self._record_spans(tracked, times, outcome)

    def dropped(self, request_id: str) -> None:
        """A request left without an outcome: another engine has it, or it was given back."""
        self._tracked.pop(request_id, None)

    # Steps

    def observe(self, stats: SchedulerStats, step_seconds: float | None = None) -> None:
        """Counts a step; `stats` are those after it, `step_seconds` how long it took."""
        self._steps += 1
        if self._telemetry.measuring:
            self._record_step(stats, step_seconds)
        if self._telemetry.tracing and self._steps % STEP_SPAN_INTERVAL == 0:
            self._record_step_span(stats, step_seconds or 0.0)

    def _record_step(self, stats: SchedulerStats, step_seconds: float | None) -> None:
        if step_seconds is not None:
            self._step_duration.record(step_seconds, self._labels)
        if stats.step_prefill_tokens:
            self._step_tokens.record(stats.step_prefill_tokens, self._prefill_labels)
        if stats.step_decode_tokens:
            self._step_tokens.record(stats.step_decode_tokens, self._decode_labels)

    def _record_step_span(self, stats: SchedulerStats, step_seconds: float) -> None:
        now = self._clock_ns()
        record_step_span(
            self._telemetry.tracer,
            [tracked.request.trace for tracked in self._tracked.values()],
            number=self._steps,
            started_ns=now - int(step_seconds * 1e9),
            ended_ns=now,
            tokens=stats.step_prefill_tokens + stats.step_decode_tokens,
        )

    def _times(self, tracked: _Tracked) -> EngineTimes:
        return EngineTimes(
            queued_ns=tracked.queued_ns,
            taken_ns=tracked.taken_ns,
            first_token_ns=tracked.first_token_ns,
            ended_ns=self._clock_ns(),
            first_step=tracked.first_step,
            first_token_step=tracked.first_token_step or self._steps,
            last_step=self._steps,
        )

    def _record_phases(self, times: EngineTimes) -> None:
        if times.first_token_ns is not None:
            prefill = (times.first_token_ns - times.taken_ns) / 1e9
            decode = (times.ended_ns - times.first_token_ns) / 1e9
            self._phases.record(max(0.0, prefill), self._prefill_labels)
            self._phases.record(max(0.0, decode), self._decode_labels)

    def _record_spans(self, tracked: _Tracked, times: EngineTimes, outcome: Outcome) -> None:
        record_engine_spans(
            self._telemetry.tracer,
            tracked.request,
            times,
            engine_id=self._engine_id,
            attempt=tracked.attempt,
            output_tokens=sum(len(choice.token_ids) for choice in outcome.choices),
            cached_tokens=outcome.cached_tokens,
            finish_reasons=[c.finish_reason for c in outcome.choices if c.finish_reason],
            error_type=outcome.failed.failure.value if outcome.failed else None,
        )

    # What exporters read

    def _snapshot(self) -> "_Snapshot":
        return _Snapshot(self._stats(), self._input_tokens, self._output_tokens, self._adapters())

    def _observe_all(self, meter: Meter, step_age: Callable[[], float], capacity: int) -> None:
        for metric, read in _GAUGES:
            observed_gauge(meter, metric, self._observer(read))
        for metric, read in _COUNTERS:
            observed_counter(meter, metric, self._observer(read))
        observed_gauge(meter, names.ENGINE_CAPACITY, lambda: [Observation(capacity, self._labels)])
        observed_gauge(
            meter, names.ENGINE_STEP_LAST_AGE, lambda: [Observation(step_age(), self._labels)]
        )

    def _observer(self, read: "_Read") -> Callable[[], Iterable[Observation]]:
        return lambda: [
            Observation(value, {**self._labels, **own}) for own, value in read(self._snapshot())
        ]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    stats: SchedulerStats
    input_tokens: int
    output_tokens: int
    adapters: AdapterUse | None


_Read = Callable[[_Snapshot], Iterable[tuple[dict[str, str], float]]]


def _requests(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {names.STATE: "running"}, now.stats.running
    yield {names.STATE: "waiting"}, now.stats.waiting
    yield {names.STATE: "swapped"}, now.stats.swapped


def _utilization(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {}, kv_utilization(now.stats)


def _blocks(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {names.STATE: "used", names.PLACE: "device"}, now.stats.blocks_used
    yield {names.STATE: "cached", names.PLACE: "device"}, now.stats.blocks_cached
    yield {names.STATE: "free", names.PLACE: "device"}, now.stats.blocks_free
    yield {names.STATE: "used", names.PLACE: "host"}, now.stats.host_blocks_used
    yield {names.STATE: "free", names.PLACE: "host"}, now.stats.host_blocks_free


def _waste(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {}, now.stats.kv_waste


def _swapped(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {names.KIND: "out"}, now.stats.swap_out_bytes
    yield {names.KIND: "in"}, now.stats.swap_in_bytes


def _preemptions(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {names.KIND: "recompute"}, now.stats.preemptions
    yield {names.KIND: "swap"}, now.stats.swaps


def _prefix_cache(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {names.RESULT: "hit"}, now.stats.prefix_hit_tokens
    yield {names.RESULT: "miss"}, now.stats.prefix_miss_tokens


def _speculation(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    stats = now.stats.speculation
    if stats is not None:
        yield {names.RESULT: "accepted"}, stats.accepted_tokens
        yield {names.RESULT: "rejected"}, stats.draft_tokens - stats.accepted_tokens


def _tokens(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {names.TYPE: "input"}, now.input_tokens
    yield {names.TYPE: "output"}, now.output_tokens


_GAUGES: tuple[tuple[names.Metric, _Read], ...] = (
    (names.ENGINE_REQUESTS, _requests),
    (names.ENGINE_KV_UTILIZATION, _utilization),
    (names.ENGINE_KV_BLOCKS, _blocks),
    (names.ENGINE_KV_WASTE, _waste),
)
_COUNTERS: tuple[tuple[names.Metric, _Read], ...] = (
    (names.ENGINE_PREEMPTIONS, _preemptions),
    (names.ENGINE_KV_SWAPPED, _swapped),
    (names.ENGINE_PREFIX_CACHE_TOKENS, _prefix_cache),
    (names.ENGINE_SPEC_TOKENS, _speculation),
    (names.ENGINE_TOKENS, _tokens),
)


def kv_utilization(stats: SchedulerStats) -> float:
    """Share of KV blocks that sequences hold, 0 to 1; cached blocks count as free."""
    total = stats.blocks_used + stats.blocks_cached + stats.blocks_free
    return stats.blocks_used / total if total else 0.0


class _VllmNames(Collector):
    """The same readings under vLLM's names, which OpenTelemetry cannot give: they hold a colon."""

    def __init__(
        self,
        snapshot: Callable[[], _Snapshot],
        model: str,
        engine_id: str,
        block_size: int,
    ) -> None:
        self._snapshot = snapshot
        self._labels = (model, engine_id)
        self._block_size = block_size

    def collect(self) -> Iterable[PrometheusMetric]:
        now = self._snapshot()
        stats = now.stats
        total = stats.blocks_used + stats.blocks_cached + stats.blocks_free
        yield self._gauge(names.VLLM_REQUESTS_RUNNING, "Running sequences.", stats.running)
        yield self._gauge(names.VLLM_REQUESTS_WAITING, "Waiting sequences.", stats.waiting)
        yield self._gauge(
            names.VLLM_KV_CACHE_USAGE, "KV blocks in use, 0 to 1.", kv_utilization(stats)
        )
        config = GaugeMetricFamily(
            names.VLLM_CACHE_CONFIG,
            "Size of the KV cache; always 1.",
            labels=(*names.VLLM_LABELS, "block_size", "num_gpu_blocks"),
        )
        config.add_metric((*self._labels, str(self._block_size), str(total)), 1)
        yield config
        queries = stats.prefix_hit_tokens + stats.prefix_miss_tokens
        yield self._counter(names.VLLM_PREEMPTIONS, "Preemptions.", stats.preemptions + stats.swaps)
        yield self._counter(names.VLLM_PROMPT_TOKENS, "Prompt tokens.", now.input_tokens)
        yield self._counter(names.VLLM_GENERATION_TOKENS, "Output tokens.", now.output_tokens)
        yield self._counter(names.VLLM_PREFIX_CACHE_QUERIES, "Tokens looked up.", queries)
        yield self._counter(names.VLLM_PREFIX_CACHE_HITS, "Tokens found.", stats.prefix_hit_tokens)
        if stats.speculation is not None:
            yield from self._speculation(stats.speculation)
        if now.adapters is not None:
            yield self._lora(now.adapters)

    def _speculation(self, stats: SpeculationStats) -> Iterable[PrometheusMetric]:
        yield self._counter(names.VLLM_SPEC_DRAFTS, "Proposals.", stats.drafts)
        yield self._counter(names.VLLM_SPEC_DRAFT_TOKENS, "Drafted tokens.", stats.draft_tokens)
        yield self._counter(
            names.VLLM_SPEC_ACCEPTED, "Accepted drafted tokens.", stats.accepted_tokens
        )
        positions = CounterMetricFamily(
            names.VLLM_SPEC_ACCEPTED_PER_POSITION,
            "Proposals whose token at a position, from 0, was accepted.",
            labels=(*names.VLLM_LABELS, "position"),
        )
        for position, count in enumerate(stats.accepted_per_position):
            positions.add_metric((*self._labels, str(position)), count)
        yield positions

    def _lora(self, use: AdapterUse) -> PrometheusMetric:
        """As vLLM's: the facts are in the labels, and the newest sample counts."""
        family = GaugeMetricFamily(
            names.VLLM_LORA_REQUESTS,
            "Adapters whose requests run and wait; the value is the time in Unix seconds.",
            labels=(
                *names.VLLM_LABELS,
                "max_lora",
                "running_lora_adapters",
                "waiting_lora_adapters",
            ),
        )
        lists = (",".join(use.running), ",".join(use.waiting))
        family.add_metric((*self._labels, str(use.slots), *lists), time.time())
        return family

    def _gauge(self, name: str, text: str, value: float) -> PrometheusMetric:
        family = GaugeMetricFamily(name, text, labels=names.VLLM_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> PrometheusMetric:
        family = CounterMetricFamily(name, text, labels=names.VLLM_LABELS)
        family.add_metric(self._labels, value)
        return family
