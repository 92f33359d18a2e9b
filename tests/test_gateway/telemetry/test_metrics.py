"""The gateway's metrics as Prometheus sees them, and the queue read through the event loop."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.observability import metric_names as names
from headrace_common.observability.telemetry import Telemetry, setup
from headrace_common.protocol.base import QueueDepth
from headrace_common.protocol.batches import Batch, BatchProgress, BatchRequest, BatchStatus
from headrace_gateway.queue_client.canary_comparisons import ComparisonResult
from headrace_gateway.telemetry.batch_scrape_cache import BatchScrapeCache, summed_up
from headrace_gateway.telemetry.metrics import (
    CompletedRequest,
    GatewayMetrics,
    QueueScrapeCache,
    RejectReason,
)
from headrace_gateway.telemetry.scrape_cache import LIFETIME_S
from headrace_testing.telemetry import scrape, value


class FakeDepths:
    def __init__(self) -> None:
        self.reads = 0
        self.failing = False
        self.empty = False

    async def depth(self, model: str) -> QueueDepth:
        self.reads += 1
        if self.failing:
            raise BackendUnavailable("redis is gone")
        if self.empty:
            return QueueDepth(waiting=0, waiting_tokens=0, pending=0, oldest_age=0)
        return QueueDepth(waiting=3, waiting_tokens=900, pending=2, oldest_age=1.5, dead_letters=4)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    opened = setup("gateway", metrics_port=0)
    yield opened
    opened.shutdown()


def url_of(telemetry: Telemetry) -> str:
    assert telemetry.server is not None
    return telemetry.server.url


def test_comparisons_with_a_canary_are_counted(telemetry: Telemetry) -> None:
    metrics = GatewayMetrics(telemetry.meter)
    metrics.compared("demo", ComparisonResult.EQUAL)
    for position in (0, 7):
        metrics.compared("demo", ComparisonResult.DIFFERENT, position)
    families = scrape(url_of(telemetry))
    model = {"gen_ai_request_model": "demo"}
    compared = "headrace_gateway_canary_comparisons_total"
    assert value(families, compared, result="equal", **model) == 1
    assert value(families, compared, result="different", **model) == 2
    assert value(families, "headrace_gateway_canary_first_difference_sum", **model) == 7


def test_a_completed_request_is_measured(telemetry: Telemetry) -> None:
    metrics = GatewayMetrics(telemetry.meter)
    metrics.completed(
        CompletedRequest(
            model="demo",
            operation=names.OPERATION_CHAT,
            duration=3.0,
            input_tokens=100,
            token_spans=[(11, 1.0), (1, 0.0)],
            time_to_first_token=0.5,
        )
    )
    families = scrape(url_of(telemetry))
    model = {"gen_ai_request_model": "demo", "gen_ai_operation_name": "chat"}
    assert value(families, "gen_ai_server_request_duration_seconds_sum", **model) == 3.0
    assert value(families, "gen_ai_server_time_to_first_token_seconds_sum", **model) == 0.5
    # One token has no time per token after the first.
    assert value(families, "gen_ai_server_time_per_output_token_seconds_count", **model) == 1
    assert value(families, "gen_ai_server_time_per_output_token_seconds_sum", **model) == 0.1
    usage = "gen_ai_client_token_usage_sum"
    assert value(families, usage, gen_ai_token_type="input", **model) == 100
    assert value(families, usage, gen_ai_token_type="output", **model) == 12


def test_a_failed_request_names_its_error(telemetry: Telemetry) -> None:
    metrics = GatewayMetrics(telemetry.meter)
    metrics.completed(
        CompletedRequest(
            model="demo",
            operation=names.OPERATION_CHAT,
            duration=1.0,
            input_tokens=5,
            token_spans=[],
            error_type="deadline_exceeded",
        )
    )
    families = scrape(url_of(telemetry))
    name = "gen_ai_server_request_duration_seconds_count"
    assert value(families, name, error_type="deadline_exceeded") == 1
    assert "gen_ai_server_time_to_first_token_seconds" not in families


def test_admission_and_connections_are_counted(telemetry: Telemetry) -> None:
    metrics = GatewayMetrics(telemetry.meter)
    metrics.admitted("demo")
    metrics.admitted("demo", low_priority=True)
    metrics.rejected("demo", RejectReason.QUEUE_FULL)
    metrics.rejected("demo", RejectReason.QUEUE_FULL)
    metrics.disconnected("demo")
    metrics.started("demo", stream=True)
    metrics.started("demo", stream=False)
    metrics.stopped("demo", stream=False)
    families = scrape(url_of(telemetry))
    assert value(families, "headrace_queue_admitted_total") == 2
    assert value(families, "headrace_queue_low_priority_admitted_total") == 1
    assert value(families, "headrace_queue_rejected_total", reason="queue_full") == 2
    assert value(families, "headrace_gateway_disconnects_total") == 1
    assert value(families, "headrace_gateway_requests_in_flight", stream="true") == 1
    assert value(families, "headrace_gateway_requests_in_flight", stream="false") == 0


class Queues:
    """One model's queue, and models that were removed."""

    queues = ("demo",)

    def __init__(self, *removed: str) -> None:
        self.removed = list(removed)

    def forget(self, model: str) -> None:
        self.removed.remove(model)


async def test_the_queue_of_a_removed_model_is_shown_until_it_is_empty(
    telemetry: Telemetry,
) -> None:
    queue, clock, queues = FakeDepths(), Clock(), Queues("gone")
    cache = QueueScrapeCache(queue, queues, asyncio.get_running_loop(), clock)
    GatewayMetrics(telemetry.meter).observe_queue(cache)
    families = await asyncio.to_thread(scrape, url_of(telemetry))
    assert value(families, "headrace_queue_depth", gen_ai_request_model="gone") == 3

    queue.empty = True
    clock.now += LIFETIME_S
    families = await asyncio.to_thread(scrape, url_of(telemetry))
    shown = {
        sample.labels["gen_ai_request_model"] for sample in families["headrace_queue_depth"].samples
    }
    assert shown == {"demo"}
    assert queues.removed == []


async def test_the_queue_is_read_once_a_scrape_and_only_then(telemetry: Telemetry) -> None:
    queue, clock = FakeDepths(), Clock()
    cache = QueueScrapeCache(queue, Queues(), asyncio.get_running_loop(), clock)
    GatewayMetrics(telemetry.meter).observe_queue(cache)
    assert queue.reads == 0
    families = await asyncio.to_thread(scrape, url_of(telemetry))
    model = {"gen_ai_request_model": "demo"}
    assert value(families, "headrace_queue_depth", **model) == 3
    assert value(families, "headrace_queue_tokens", **model) == 900
    assert value(families, "headrace_queue_pending", **model) == 2
    assert value(families, "headrace_queue_oldest_age_seconds", **model) == 1.5
    assert queue.reads == 1
    clock.now += LIFETIME_S
    await asyncio.to_thread(scrape, url_of(telemetry))
    assert queue.reads == 2


async def test_an_unreachable_queue_leaves_a_gap_and_comes_back(telemetry: Telemetry) -> None:
    queue, clock = FakeDepths(), Clock()
    cache = QueueScrapeCache(queue, Queues(), asyncio.get_running_loop(), clock)
    metrics = GatewayMetrics(telemetry.meter)
    metrics.observe_queue(cache)
    metrics.admitted("demo")
    queue.failing = True
    families = await asyncio.to_thread(scrape, url_of(telemetry))
    assert "headrace_queue_depth" not in families
    assert value(families, "headrace_queue_admitted_total") == 1
    queue.failing = False
    clock.now += LIFETIME_S
    families = await asyncio.to_thread(scrape, url_of(telemetry))
    assert value(families, "headrace_queue_depth") == 3


def test_a_closed_event_loop_leaves_a_gap() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert QueueScrapeCache(FakeDepths(), Queues(), loop).current() == {}


class FakeBatches:
    def __init__(self, *batches: Batch) -> None:
        self.batches = batches
        self.failing = False

    async def all_open(self) -> Sequence[Batch]:
        if self.failing:
            raise BackendUnavailable("redis is gone")
        return self.batches


def open_batch(created: int, status: BatchStatus, *, cancelling: bool = False) -> Batch:
    """A batch of ten requests, four of which have a result."""
    request = BatchRequest(
        id=f"batch_{created}",
        tenant="t",
        key_id="",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        created_at=created,
        expires_at=created + 86_400,
        output_ttl=3600,
        kept_until=created + 90_000,
    )
    progress = BatchProgress(status=status, total=10, completed=3, failed=1)
    return Batch(request=request, progress=progress, cancelling_at=1 if cancelling else None)


async def test_open_batches_are_those_of_all_gateways(telemetry: Telemetry) -> None:
    batches = FakeBatches(
        open_batch(900, BatchStatus.IN_PROGRESS),
        open_batch(950, BatchStatus.IN_PROGRESS),
        open_batch(970, BatchStatus.IN_PROGRESS, cancelling=True),
    )
    cache = BatchScrapeCache(batches, asyncio.get_running_loop(), Clock())
    GatewayMetrics(telemetry.meter).observe_batches(cache)
    families = await asyncio.to_thread(scrape, url_of(telemetry))
    assert value(families, "headrace_batch_open", state="in_progress") == 2
    assert value(families, "headrace_batch_open", state="cancelling") == 1
    assert value(families, "headrace_batch_open", state="validating") == 0
    assert value(families, "headrace_batch_requests_left") == 18
    assert value(families, "headrace_batch_oldest_age_seconds") == 100
    assert value(families, "headrace_batch_ended_total", state="expired") == 0


async def test_batches_behind_their_pace_are_told_by_model() -> None:
    """Four of ten results are enough at 44 % of the window, but not at 47 %."""
    opened = [open_batch(created, BatchStatus.IN_PROGRESS) for created in (-37_000, -40_000)]
    batches = [replace(each, progress=replace(each.progress, models=("a", "b"))) for each in opened]

    assert summed_up(batches, now=1000).behind == {"a": 1, "b": 1}
    assert summed_up(batches[:1], now=1000).behind == {}


async def test_tokens_of_placed_prompts_are_counted_by_kind(telemetry: Telemetry) -> None:
    tokens = {("m", "prompt"): 100, ("m", "found"): 64, ("other", "prompt"): 7}
    GatewayMetrics(telemetry.meter).observe_placement(tokens)
    families = await asyncio.to_thread(scrape, url_of(telemetry))
    name = "headrace_gateway_placement_tokens_total"
    assert value(families, name, gen_ai_request_model="m", kind="prompt") == 100
    assert value(families, name, gen_ai_request_model="m", kind="found") == 64
    assert value(families, name, gen_ai_request_model="other", kind="prompt") == 7


async def test_unreadable_batches_leave_a_gap(telemetry: Telemetry) -> None:
    batches = FakeBatches()
    batches.failing = True
    metrics = GatewayMetrics(telemetry.meter)
    metrics.observe_batches(BatchScrapeCache(batches, asyncio.get_running_loop(), Clock()))
    metrics.batch_request(answered=True)
    metrics.batch_request(answered=False)
    metrics.batch_ended("completed")
    families = await asyncio.to_thread(scrape, url_of(telemetry))
    assert not {"headrace_batch_open", "headrace_batch_oldest_age_seconds"} & set(families)
    assert value(families, "headrace_batch_requests_total", result="completed") == 1
    assert value(families, "headrace_batch_requests_total", result="failed") == 1
    assert value(families, "headrace_batch_ended_total", state="completed") == 1
