"""The engine's metrics as Prometheus sees them, under our names and vLLM's, and its spans."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from headrace_common.errors import FailureCode
from headrace_common.observability import metric_names as names
from headrace_common.observability.telemetry import Telemetry, disabled, setup
from headrace_common.protocol.base import Lease, Outcome
from headrace_common.protocol.variants import COMPARISON_TENANT
from headrace_common.sampling.params import SamplingParams
from headrace_common.wire.messages import ChoiceState, Failed, GenerateRequest
from headrace_engine.core.speculative_stats import SpeculationStats
from headrace_engine.core.stats import SchedulerStats, SharedKVStats
from headrace_engine.scheduler.lora_stats import LoRAStats
from headrace_engine.serving.leased_request import LeasedRequest
from headrace_engine.serving.metrics import STEP_SPAN_INTERVAL, EngineMetrics
from headrace_testing.telemetry import SpanMemory, scrape, value

STATS = SchedulerStats(
    running=4,
    waiting=2,
    swapped=1,
    blocks_used=30,
    blocks_cached=20,
    blocks_free=50,
    preemptions=3,
    prefix_hit_tokens=64,
    prefix_miss_tokens=36,
    step_prefill_tokens=100,
    step_decode_tokens=4,
    swaps=2,
    swap_out_bytes=4096,
    swap_in_bytes=1024,
    host_blocks_used=6,
    host_blocks_free=14,
    kv_slots_used=400,
    kv_slots_unused=10,
    host_hit_tokens=16,
    shared_hit_tokens=8,
    swap_seconds=0.5,
    shared=SharedKVStats(
        blocks_hit=3,
        blocks_missed=5,
        blocks_failed=1,
        blocks_skipped=2,
        bytes_in=2048,
        bytes_out=512,
        seconds_in=0.25,
    ),
    images_encoded=3,
    image_tokens_encoded=96,
    encode_seconds=0.75,
    encoder_cache_queries=9,
    encoder_cache_hits=5,
)
SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 102 * SECOND

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    opened = setup("engine", metrics_port=0)
    yield opened
    opened.shutdown()


def metrics_of(
    telemetry: Telemetry,
    clock: Clock | None = None,
    stats: SchedulerStats = STATS,
    adapters: LoRAStats | None = None,
    sleep_level: int = 0,
) -> EngineMetrics:
    return EngineMetrics(
        telemetry,
        model="demo",
        engine_id="engine-a",
        block_size=16,
        capacity=64,
        stats=lambda: stats,
        step_age=lambda: 2.5,
        lora_stats=lambda: adapters,
        sleep_level=lambda: sleep_level,
        start_seconds=lambda: {"imports": 1.5, "weights": 0.25},
        clock_ns=clock or Clock(),
    )


def take(
    metrics: EngineMetrics, trace: dict[str, str] | None = None, **lease: Any
) -> LeasedRequest:
    request = GenerateRequest(
        request_id="r1",
        model="demo",
        prompt_token_ids=tuple(range(50)),
        sampling=SamplingParams(seed=1),
        created_ms=100_000,
        deadline_ms=200_000,
        trace=trace or {},
    )
    taken = Lease(**{"request": request, "attempt": 1, "gateway_id": "g", **lease})
    return LeasedRequest(taken, metrics.taken(taken))


def test_the_engines_state_is_exported_before_its_first_step(telemetry: Telemetry) -> None:
    metrics_of(telemetry)
    assert telemetry.server is not None
    families = scrape(telemetry.server.url)
    requests, blocks = "headrace_engine_requests", "headrace_engine_kv_blocks"
    assert value(families, requests, state="running", gen_ai_request_model="demo") == 4
    assert value(families, requests, state="waiting") == 2
    assert value(families, requests, state="swapped") == 1
    assert value(families, "headrace_engine_kv_utilization") == 0.3
    assert value(families, blocks, state="used", place="device") == 30
    assert value(families, blocks, state="cached", place="device") == 20
    assert value(families, blocks, state="free", place="device") == 50
    assert value(families, blocks, state="used", place="host") == 6
    assert value(families, blocks, state="free", place="host") == 14
    assert value(families, "headrace_engine_kv_waste") == 0.025
    assert value(families, "headrace_engine_kv_swapped_bytes_total", kind="out") == 4096
    assert value(families, "headrace_engine_kv_swapped_bytes_total", kind="in") == 1024
    assert value(families, "headrace_engine_preemptions_total", kind="recompute") == 3
    assert value(families, "headrace_engine_preemptions_total", kind="swap") == 2
    assert value(families, "headrace_engine_prefix_cache_tokens_total", result="hit") == 64
    assert value(families, "headrace_engine_prefix_cache_tokens_total", result="miss") == 36
    hits, copies = "headrace_engine_prefix_cache_hits_total", "headrace_engine_kv_copy_time_seconds"
    assert value(families, hits, place="device") == 40
    assert value(families, hits, place="host") == 16
    assert value(families, hits, place="shared") == 8
    assert value(families, f"{copies}_total", place="host") == 0.5
    assert value(families, f"{copies}_total", place="shared") == 0.25
    shared = "headrace_engine_kv_shared"
    assert value(families, f"{shared}_bytes_total", kind="out") == 512
    assert value(families, f"{shared}_bytes_total", kind="in") == 2048
    for result, count in (("hit", 3), ("miss", 5), ("failed", 1), ("skipped", 2)):
        assert value(families, f"{shared}_blocks_total", result=result) == count
    assert value(families, "headrace_engine_encoder_images_total") == 3
    assert value(families, "headrace_engine_encoder_tokens_total") == 96
    assert value(families, "headrace_engine_encoder_time_seconds_total") == 0.75
    assert value(families, "headrace_engine_encoder_cache_images_total", result="hit") == 5
    assert value(families, "headrace_engine_encoder_cache_images_total", result="miss") == 4
    assert value(families, "headrace_engine_step_last_age_seconds") == 2.5
    start = "headrace_engine_start_duration_seconds"
    assert value(families, start, phase="imports") == 1.5
    assert value(families, start, phase="weights") == 0.25


def test_a_request_that_another_engine_had_is_a_redelivery(telemetry: Telemetry) -> None:
    metrics = metrics_of(telemetry)
    take(metrics, attempt=1)
    take(metrics, attempt=2)
    assert telemetry.server is not None
    families = scrape(telemetry.server.url)
    assert value(families, "headrace_queue_redeliveries_total") == 1


def test_requests_are_counted_by_whether_they_were_placed_here(telemetry: Telemetry) -> None:
    metrics = metrics_of(telemetry)
    for placed in (True, True, False, None):
        take(metrics, placed=placed)
    take(metrics, attempt=2)
    assert telemetry.server is not None
    families = scrape(telemetry.server.url)
    counts = {"placed": 2, "stolen": 1, "unplaced": 1}
    for result, count in counts.items():
        assert value(families, "headrace_queue_placements_total", result=result) == count


def test_steps_requests_and_tokens_are_counted(telemetry: Telemetry) -> None:
    clock = Clock()
    metrics = metrics_of(telemetry, clock)
    leased = take(metrics, waited=2.0)
    metrics.observe(STATS, 0.25)
    clock.now += SECOND
    metrics.produced(leased, 1)
    clock.now += 4 * SECOND
    metrics.produced(leased, 8)
    metrics.ended(leased, Outcome(choices=(ChoiceState(token_ids=(1,) * 9),)))
    metrics.handed_over(48, 9600.0, 0.5)
    assert telemetry.server is not None
    families = scrape(telemetry.server.url)
    assert value(families, "headrace_engine_handover_tokens_total") == 48
    assert value(families, "headrace_engine_handover_kv_bytes_total") == 9600
    assert value(families, "headrace_engine_handover_duration_seconds_sum") == 0.5
    assert value(families, "headrace_engine_step_duration_seconds_sum") == 0.25
    assert value(families, "headrace_engine_step_tokens_sum", phase="prefill") == 100
    assert value(families, "headrace_engine_step_tokens_sum", phase="decode") == 4
    assert value(families, "headrace_engine_tokens_total", type="input") == 50
    assert value(families, "headrace_engine_tokens_total", type="output") == 9
    phase = "headrace_engine_request_phase_duration_seconds_sum"
    assert value(families, phase, phase="queue") == 2.0
    assert value(families, phase, phase="prefill") == 1.0
    assert value(families, phase, phase="decode") == 4.0
    side = {"variant": "stable", "gen_ai_request_model": "demo"}
    assert value(families, "headrace_engine_requests_ended_total", error_type="", **side) == 1
    assert value(families, "headrace_engine_time_to_first_token_seconds_sum", **side) == 3.0
    assert value(families, "headrace_engine_time_per_output_token_seconds_sum", **side) == 0.5
    metrics.turn_began(2.5)
    families = scrape(telemetry.server.url)
    assert value(families, "headrace_engine_turns_total", gen_ai_request_model="demo") == 1
    assert value(families, "headrace_engine_turn_wait_seconds_sum") == 2.5
    assert {
        metric.prometheus_name
        for metric in names.ENGINE_METRICS
        if metric not in (names.QUEUE_REDELIVERIES, names.ENGINE_SPEC_TOKENS)
    } <= {sample.name.removesuffix("_bucket") for f in families.values() for sample in f.samples}


def test_a_request_that_compares_a_canary_is_not_part_of_its_sides_figures(
    telemetry: Telemetry,
) -> None:
    metrics = metrics_of(telemetry)
    for tenant in ("acme", COMPARISON_TENANT):
        leased = take(metrics)
        leased.request = replace(leased.request, tenant=tenant)
        metrics.produced(leased, 5)
        metrics.ended(leased, Outcome())
    assert telemetry.server is not None
    families = scrape(telemetry.server.url)
    assert value(families, "headrace_engine_requests_ended_total", variant="stable") == 1
    assert value(families, "headrace_engine_time_to_first_token_seconds_count") == 1


def test_prometheus_finds_vllms_names_with_their_colons(telemetry: Telemetry) -> None:
    metrics_of(telemetry)
    assert telemetry.server is not None
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4"}
    text = httpx.get(f"{telemetry.server.url}/metrics", headers=accept).text
    assert text.endswith("# EOF\n")
    assert "\nvllm:num_requests_running{" in text


def test_routers_find_vllms_names(telemetry: Telemetry) -> None:
    metrics = metrics_of(telemetry)
    metrics.produced(take(metrics), 5)
    assert telemetry.server is not None
    families = scrape(telemetry.server.url)
    labels = {"model_name": "demo", "engine": "engine-a"}
    assert value(families, "vllm:num_requests_waiting", **labels) == 2
    assert value(families, "vllm:num_requests_running", **labels) == 4
    assert value(families, "vllm:kv_cache_usage_perc", **labels) == 0.3
    assert value(families, "vllm:num_preemptions_total", **labels) == 5
    assert value(families, "vllm:generation_tokens_total", **labels) == 5
    assert value(families, "vllm:prompt_tokens_total", **labels) == 50
    assert value(families, "vllm:prefix_cache_queries_total", **labels) == 100
    assert value(families, "vllm:prefix_cache_hits_total", **labels) == 40
    assert value(families, "vllm:external_prefix_cache_queries_total", **labels) == 60
    assert value(families, "vllm:external_prefix_cache_hits_total", **labels) == 24
    assert value(families, "vllm:mm_cache_queries_total", **labels) == 9
    assert value(families, "vllm:mm_cache_hits_total", **labels) == 5
    size = {"block_size": "16", "num_gpu_blocks": "100"}
    assert value(families, "vllm:cache_config_info", **labels, **size) == 1


def test_routers_find_which_adapters_run(telemetry: Telemetry) -> None:
    metrics_of(telemetry, adapters=LoRAStats(2, ("a", "b"), ("c",)))
    assert telemetry.server is not None
    labels = {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}

    families = scrape(telemetry.server.url)

    assert value(families, "vllm:lora_requests_info", model_name="demo", **labels) > 0


@pytest.mark.parametrize(
    ("level", "name"), [(0, "awake"), (1, "weights_offloaded"), (2, "discard_all")]
)
def test_the_state_of_sleep_has_vllms_name(telemetry: Telemetry, level: int, name: str) -> None:
    metrics_of(telemetry, sleep_level=level)
    assert telemetry.server is not None
    states = {
        sample.labels["sleep_state"]: sample.value
        for sample in scrape(telemetry.server.url)["vllm:engine_sleep_state"].samples
    }
    assert states == {each: each == name for each in ("awake", "weights_offloaded", "discard_all")}


def test_a_requests_spans_are_written_when_it_ends() -> None:
    memory, clock = SpanMemory(), Clock()
    metrics = metrics_of(replace(disabled(), tracer=memory.tracer, tracing=True), clock)
    leased = take(metrics, {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}, attempt=2)
    metrics.observe(STATS, 0.01)
    metrics.produced(leased, 1)
    assert memory.spans == {}
    failed = Failed(request_id="r1", attempt=2, failure=FailureCode.DEADLINE, message="late")
    metrics.ended(leased, Outcome(choices=(ChoiceState(token_ids=(1,)),), failed=failed))
    assert set(memory.spans) == {
        names.SPAN_QUEUE,
        names.SPAN_ENGINE,
        names.SPAN_PREFILL,
        names.SPAN_DECODE,
    }
    attributes = memory.spans[names.SPAN_ENGINE].attributes
    assert attributes is not None
    assert attributes[names.ERROR_TYPE] == "deadline_exceeded"
    assert attributes[names.ATTEMPT] == 2
    assert attributes[names.ENGINE_ID] == "engine-a"


def test_few_steps_become_spans() -> None:
    memory = SpanMemory()
    metrics = metrics_of(replace(disabled(), tracer=memory.tracer, tracing=True))
    leased = take(metrics, {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    for _ in range(STEP_SPAN_INTERVAL - 1):
        metrics.observe(STATS, 0.5, [leased])
    assert memory.spans == {}
    metrics.observe(STATS, 0.5, [leased])
    step = memory.spans[names.SPAN_STEP]
    assert [link.context.trace_id for link in step.links] == [int("a" * 32, 16)]
    assert step.attributes is not None
    assert step.attributes[names.STEP_NUMBER] == STEP_SPAN_INTERVAL


def test_speculation_is_exported_where_it_is_on(telemetry: Telemetry) -> None:
    speculation = SpeculationStats(
        drafts=10, draft_tokens=40, accepted_tokens=13, accepted_per_position=(9, 3, 1, 0)
    )
    metrics_of(telemetry, stats=replace(STATS, speculation=speculation))
    assert telemetry.server is not None
    families = scrape(telemetry.server.url)
    assert value(families, "headrace_engine_spec_tokens_total", result="accepted") == 13
    assert value(families, "headrace_engine_spec_tokens_total", result="rejected") == 27
    assert value(families, "vllm:spec_decode_num_drafts_total") == 10
    assert value(families, "vllm:spec_decode_num_draft_tokens_total") == 40
    assert value(families, "vllm:spec_decode_num_accepted_tokens_total") == 13
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    found = [value(families, per_position, position=str(place)) for place in range(4)]
    assert found == [9, 3, 1, 0]


def test_speculation_is_not_exported_where_it_is_off(telemetry: Telemetry) -> None:
    metrics_of(telemetry)
    assert telemetry.server is not None
    assert not [name for name in scrape(telemetry.server.url) if "spec_decode" in name]
