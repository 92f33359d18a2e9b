"""The engine's metrics, and the trace spans of its requests.

The worker writes them on its event loop; exporters read them on their threads. A step costs an
addition and, if metrics are exported, three histogram records.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opentelemetry.metrics import Meter, Observation
from prometheus_client import Metric as PrometheusMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace_common.observability import metric_names as names
from headrace_common.observability.instruments import (
    counter,
    histogram,
    observed_counter,
    observed_gauge,
)
from headrace_common.observability.telemetry import Telemetry
from headrace_common.observability.tracing import EngineTimes, record_engine_spans, record_step_span
from headrace_common.protocol.base import Lease, Outcome
from headrace_common.protocol.variants import is_comparison
from headrace_common.wire.messages import adapter_name

from ..core.speculative_stats import SpeculationStats
from ..core.stats import SchedulerStats
from ..scheduler.lora_stats import LoRAStats
from .leased_request import LeasedRequest, RequestTimes

# Every n-th step becomes a span that links to the requests of its batch.
STEP_SPAN_INTERVAL = 1000

# vLLM's names of the states by level.
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_PLACEMENTS = {True: "placed", False: "stolen", None: "unplaced"}


class EngineMetrics:
    """Instruments and traces of one engine. Its methods are cheap, and cheaper without exporters.

    `stats` returns the engine's present state; exporters call it on their threads. `capacity` is
    the most sequences that run at once, `variant` the side of requests that it runs. `step_age`
    returns the seconds since the last finished step while there is work, else 0. `lora_stats`
    returns the adapters in use, `sleep_level` is 0 while the engine is awake, `start_seconds`
    returns the seconds of each phase of the start.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        model: str,
        engine_id: str,
        block_size: int,
        capacity: int,
        variant: str = "",
        stats: Callable[[], SchedulerStats],
        step_age: Callable[[], float],
        lora_stats: Callable[[], LoRAStats | None] = lambda: None,
        sleep_level: Callable[[], int] = lambda: 0,
        start_seconds: Callable[[], Mapping[str, float]] = dict,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._telemetry = telemetry
        self._model = model
        self._engine_id = engine_id
        self._clock_ns = clock_ns
        self._stats = stats
        self._lora_stats = lora_stats
        self._sleep_level = sleep_level
        self._steps = 0
        self._input_tokens = 0
        self._output_tokens = 0
        self._labels = {names.REQUEST_MODEL: model}
        self._side_labels = {**self._labels, names.VARIANT: variant or "stable"}
        self._make_instruments(telemetry.meter)
        self._observe_all(telemetry.meter, step_age, capacity)
        observed_gauge(
            telemetry.meter,
            names.ENGINE_START_DURATION,
            lambda: [
                Observation(spent, {**self._labels, names.PHASE: phase})
                for phase, spent in start_seconds().items()
            ],
        )
        telemetry.register(_VllmNames(self._snapshot, model, engine_id, block_size))

    def _make_instruments(self, meter: Meter) -> None:
        self._step_duration = histogram(meter, names.ENGINE_STEP_DURATION)
        self._step_tokens = histogram(meter, names.ENGINE_STEP_TOKENS)
        self._phases = histogram(meter, names.ENGINE_REQUEST_PHASE_DURATION)
        self._ended = counter(meter, names.ENGINE_REQUESTS_ENDED)
        self._turns = counter(meter, names.ENGINE_TURNS)
        self._turn_wait = histogram(meter, names.ENGINE_TURN_WAIT)
        self._first_token = histogram(meter, names.ENGINE_TIME_TO_FIRST_TOKEN)
        self._output_token = histogram(meter, names.ENGINE_TIME_PER_OUTPUT_TOKEN)
        self._redeliveries = counter(meter, names.QUEUE_REDELIVERIES)
        self._placements = counter(meter, names.QUEUE_PLACEMENTS)
        self._handover_tokens = counter(meter, names.ENGINE_HANDOVER_TOKENS)
        self._handover_kv = counter(meter, names.ENGINE_HANDOVER_KV)
        self._handover_duration = histogram(meter, names.ENGINE_HANDOVER_DURATION)
        self._prefill_labels = {**self._labels, names.PHASE: "prefill"}
        self._decode_labels = {**self._labels, names.PHASE: "decode"}

    # Requests

    def taken(self, lease: Lease) -> RequestTimes:
        """Records that a request was taken from the queue, and returns its times so far."""
        now, waited = self._clock_ns(), max(0.0, lease.waited)
        self._phases.record(waited, {**self._labels, names.PHASE: "queue"})
        if lease.attempt > 1:
            self._redeliveries.add(1, self._labels)
        else:
            self._placements.add(1, {**self._labels, names.RESULT: _PLACEMENTS[lease.placed]})
        queued = now - int(waited * 1e9)
        return RequestTimes(queued_ns=queued, taken_ns=now, first_step=self._steps + 1)

    def compiled(self, seconds: float) -> None:
        """Records how long a request waited for its grammar."""
        self._phases.record(seconds, {**self._labels, names.PHASE: "compile"})

    def produced(self, leased: LeasedRequest, tokens: int) -> None:
        """Records output tokens of a request."""
        self._output_tokens += tokens
        if leased.times.first_token_ns is None:
            leased.times.first_token_ns = self._clock_ns()
            leased.times.first_token_step = self._steps
            self._input_tokens += len(leased.request.prompt_token_ids)

    def handed_over(self, tokens: int, kv_bytes: float, seconds: float) -> None:
        """Records that a request was handed over, with the KV of its first `tokens` tokens."""
        self._handover_tokens.add(tokens, self._labels)
        self._handover_kv.add(round(kv_bytes), self._labels)
        self._handover_duration.record(seconds, self._labels)

    def turn_began(self, waited: float) -> None:
        """Records a turn on a shared accelerator, for which requests `waited`, in seconds."""
        self._turns.add(1, self._labels)
        self._turn_wait.record(waited, self._labels)

    def ended(self, leased: LeasedRequest, outcome: Outcome) -> None:
        """Records the durations and spans of a request that has its outcome."""
        times = self._engine_times(leased.times)
        self._record_phases(times)
        self._record_side(leased, times, outcome)
        if self._telemetry.tracing:
            self._record_spans(leased, times, outcome)

    # Steps

    def observe(
        self,
        stats: SchedulerStats,
        step_seconds: float | None = None,
        requests: Iterable[LeasedRequest] = (),
    ) -> None:
        """Records a step: its `step_seconds`, the `stats` after it and the leased `requests`."""
        self._steps += 1
        if self._telemetry.measuring:
            self._record_step(stats, step_seconds)
        if self._telemetry.tracing and self._steps % STEP_SPAN_INTERVAL == 0:
            self._record_step_span(stats, step_seconds or 0.0, requests)

    def _record_step(self, stats: SchedulerStats, step_seconds: float | None) -> None:
        if step_seconds is not None:
            self._step_duration.record(step_seconds, self._labels)
        if stats.step_prefill_tokens:
            self._step_tokens.record(stats.step_prefill_tokens, self._prefill_labels)
        if stats.step_decode_tokens:
            self._step_tokens.record(stats.step_decode_tokens, self._decode_labels)

    def _record_step_span(
        self, stats: SchedulerStats, step_seconds: float, requests: Iterable[LeasedRequest]
    ) -> None:
        now = self._clock_ns()
        record_step_span(
            self._telemetry.tracer,
            [leased.request.trace for leased in requests],
            number=self._steps,
            started_ns=now - int(step_seconds * 1e9),
            ended_ns=now,
            tokens=stats.step_prefill_tokens + stats.step_decode_tokens,
        )

    def _engine_times(self, times: RequestTimes) -> EngineTimes:
        return EngineTimes(
            queued_ns=times.queued_ns,
            taken_ns=times.taken_ns,
            first_token_ns=times.first_token_ns,
            ended_ns=self._clock_ns(),
            first_step=times.first_step,
            first_token_step=times.first_token_step or self._steps,
            last_step=self._steps,
        )

    def _record_phases(self, times: EngineTimes) -> None:
        if times.first_token_ns is not None:
            prefill = (times.first_token_ns - times.taken_ns) / 1e9
            decode = (times.ended_ns - times.first_token_ns) / 1e9
            self._phases.record(max(0.0, prefill), self._prefill_labels)
            self._phases.record(max(0.0, decode), self._decode_labels)

    def _record_side(self, leased: LeasedRequest, times: EngineTimes, outcome: Outcome) -> None:
        """Records what sides of a canary are compared by; latencies if no other engine ran it.

        Requests that gateways made themselves wait longer than others, so they do not count.
        """
        if is_comparison(leased.request):
            return
        error = outcome.failed.failure.value if outcome.failed else ""
        self._ended.add(1, {**self._side_labels, names.ERROR_TYPE: error})
        if times.first_token_ns is None or leased.attempt > 1:
            return
        waited = (times.first_token_ns - times.queued_ns) / 1e9
        self._first_token.record(max(0.0, waited), self._side_labels)
        tokens = max((len(choice.token_ids) for choice in outcome.choices), default=0)
        if tokens > 1:
            decode = (times.ended_ns - times.first_token_ns) / 1e9
            self._output_token.record(max(0.0, decode) / (tokens - 1), self._side_labels)

    def _record_spans(self, leased: LeasedRequest, times: EngineTimes, outcome: Outcome) -> None:
        record_engine_spans(
            self._telemetry.tracer,
            leased.request,
            times,
            engine_id=self._engine_id,
            attempt=leased.attempt,
            output_tokens=sum(len(choice.token_ids) for choice in outcome.choices),
            cached_tokens=outcome.cached_tokens,
            finish_reasons=[c.finish_reason for c in outcome.choices if c.finish_reason],
            error_type=outcome.failed.failure.value if outcome.failed else None,
        )

    # Reading

    def _snapshot(self) -> "_Snapshot":
        return _Snapshot(
            self._stats(),
            self._input_tokens,
            self._output_tokens,
            self._lora_stats(),
            self._sleep_level(),
        )

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
    lora_stats: LoRAStats | None
    sleep_level: int


_Read = Callable[[_Snapshot], Iterable[tuple[dict[str, str], float]]]


def _requests(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {names.STATE: "running"}, now.stats.running
    yield {names.STATE: "waiting"}, now.stats.waiting
    yield {names.STATE: "swapped"}, now.stats.swapped


def _utilization(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {}, now.stats.kv_utilization


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


def _shared(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    if now.stats.shared is not None:
        yield {names.KIND: "out"}, now.stats.shared.bytes_out
        yield {names.KIND: "in"}, now.stats.shared.bytes_in


def _shared_blocks(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    shared = now.stats.shared
    if shared is not None:
        yield {names.RESULT: "hit"}, shared.blocks_hit
        yield {names.RESULT: "miss"}, shared.blocks_missed
        yield {names.RESULT: "failed"}, shared.blocks_failed
        yield {names.RESULT: "skipped"}, shared.blocks_skipped


def _copy_time(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {names.PLACE: "host"}, now.stats.swap_seconds
    if now.stats.shared is not None:
        yield {names.PLACE: "shared"}, now.stats.shared.seconds_in


def _preemptions(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {names.KIND: "recompute"}, now.stats.preemptions
    yield {names.KIND: "swap"}, now.stats.swaps


def _prefix_cache(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {names.RESULT: "hit"}, now.stats.prefix_hit_tokens
    yield {names.RESULT: "miss"}, now.stats.prefix_miss_tokens


def _prefix_hits(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {names.PLACE: "device"}, now.stats.device_hit_tokens
    yield {names.PLACE: "host"}, now.stats.host_hit_tokens
    yield {names.PLACE: "shared"}, now.stats.shared_hit_tokens


def _encoder_images(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {}, now.stats.images_encoded


def _encoder_tokens(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {}, now.stats.image_tokens_encoded


def _encoder_time(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    yield {}, now.stats.encode_seconds


def _encoder_cache(now: _Snapshot) -> Iterable[tuple[dict[str, str], float]]:
    stats = now.stats
    yield {names.RESULT: "hit"}, stats.encoder_cache_hits
    yield {names.RESULT: "miss"}, stats.encoder_cache_queries - stats.encoder_cache_hits


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
    (names.ENGINE_KV_SHARED, _shared),
    (names.ENGINE_KV_SHARED_BLOCKS, _shared_blocks),
    (names.ENGINE_KV_COPY_TIME, _copy_time),
    (names.ENGINE_PREFIX_CACHE_TOKENS, _prefix_cache),
    (names.ENGINE_PREFIX_CACHE_HITS, _prefix_hits),
    (names.ENGINE_ENCODER_IMAGES, _encoder_images),
    (names.ENGINE_ENCODER_TOKENS, _encoder_tokens),
    (names.ENGINE_ENCODER_TIME, _encoder_time),
    (names.ENGINE_ENCODER_CACHE_IMAGES, _encoder_cache),
    (names.ENGINE_SPEC_TOKENS, _speculation),
    (names.ENGINE_TOKENS, _tokens),
)


class _VllmNames(Collector):
    """Exports the same values under vLLM's names, which contain a colon: OpenTelemetry forbids
    that."""

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
            names.VLLM_KV_CACHE_USAGE, "KV blocks in use, 0 to 1.", stats.kv_utilization
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
        yield self._counter(names.VLLM_PREFIX_CACHE_HITS, "Tokens found.", stats.device_hit_tokens)
        yield self._counter(
            names.VLLM_EXTERNAL_QUERIES,
            "Tokens looked up in host memory and the shared tier.",
            queries - stats.device_hit_tokens,
        )
        yield self._counter(
            names.VLLM_EXTERNAL_HITS,
            "Tokens found in host memory or the shared tier.",
            stats.external_hit_tokens,
        )
        yield self._counter(
            names.VLLM_MM_CACHE_QUERIES, "Images looked up.", stats.encoder_cache_queries
        )
        yield self._counter(
            names.VLLM_MM_CACHE_HITS, "Images found encoded.", stats.encoder_cache_hits
        )
        yield self._sleep(now.sleep_level)
        if stats.speculation is not None:
            yield from self._speculation(stats.speculation)
        if now.lora_stats is not None:
            yield self._lora(now.lora_stats)

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

    def _sleep(self, level: int) -> PrometheusMetric:
        """Reports the present state like vLLM: one of the states has the value 1."""
        family = GaugeMetricFamily(
            names.VLLM_SLEEP_STATE,
            "Whether the engine is awake, or sleeps at level 1 or 2; 1 for its state.",
            labels=(*names.VLLM_LABELS, "sleep_state"),
        )
        for number, state in enumerate(_SLEEP_STATES):
            family.add_metric((*self._labels, state), float(number == level))
        return family

    def _lora(self, stats: LoRAStats) -> PrometheusMetric:
        """Reports adapters like vLLM: in labels, where only the newest sample counts."""
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
        lists = (_names(stats.running), _names(stats.waiting))
        family.add_metric((*self._labels, str(stats.slots), *lists), time.time())
        return family

    def _gauge(self, name: str, text: str, value: float) -> PrometheusMetric:
        family = GaugeMetricFamily(name, text, labels=names.VLLM_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> PrometheusMetric:
        family = CounterMetricFamily(name, text, labels=names.VLLM_LABELS)
        family.add_metric(self._labels, value)
        return family


def _names(adapters: Iterable[str]) -> str:
    """Names of adapters, each once, whatever their versions."""
    return ",".join(dict.fromkeys(map(adapter_name, adapters)))
