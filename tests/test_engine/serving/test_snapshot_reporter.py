"""Snapshots for consoles: only while a console watches, complete, and never at the engine's
expense."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import pytest

from headrace_common.errors import BackendUnavailable, BackendUnfit
from headrace_common.protocol.base import Lease
from headrace_common.protocol.live import EngineSnapshot
from headrace_engine.core.batch_snapshot import BatchSnapshot, SequenceProgress
from headrace_engine.core.stats import SchedulerStats
from headrace_engine.engine.engine_loop import EngineLoop
from headrace_engine.serving import snapshot_reporter
from headrace_engine.serving.leased_request import LeasedRequest, RequestTimes
from headrace_engine.serving.snapshot_reporter import SnapshotReporter
from headrace_engine.serving.step_log import StepLog
from headrace_testing.backends import make_request
from headrace_testing.waiting import eventually

STATS = SchedulerStats(
    running=1,
    waiting=2,
    swapped=1,
    blocks_used=6,
    blocks_cached=3,
    blocks_free=1,
    preemptions=4,
    prefix_hit_tokens=0,
    prefix_miss_tokens=0,
    step_prefill_tokens=5,
    step_decode_tokens=7,
    swaps=1,
)


def progress(request_id: str) -> SequenceProgress:
    return SequenceProgress(
        request_id=request_id,
        choice=0,
        phase="decode",
        prompt=3,
        computed=5,
        output=3,
        max_output=16,
        step_tokens=1,
    )


class Rig:
    """A reporter with an engine's thread that answers at once, unless `hangs` is set."""

    def __init__(self) -> None:
        self.hangs = False
        self.captured = 0
        self.written: list[EngineSnapshot] = []
        self.failure: Exception | None = None
        lease = Lease(request=make_request(), attempt=1, gateway_id="g")
        self.leased = LeasedRequest(lease, RequestTimes(queued_ns=0, taken_ns=0, first_step=0))
        self.loop = Mock(spec=EngineLoop, busy=True)
        self.loop.capture.side_effect = self.capture
        self.steps = StepLog()
        self.reporter = SnapshotReporter(
            self.loop, self.steps, {self.leased.engine_key: self.leased}, self, 16
        )

    def capture(self, most: int, on_captured: Callable[[BatchSnapshot], None]) -> None:
        self.captured += 1
        sequences = (progress(self.leased.engine_key), progress("ended meanwhile"))
        if not self.hangs:
            on_captured(
                BatchSnapshot(stats=STATS, blocks_shared=2, sequences=sequences, left_out=3)
            )

    async def write(self, snapshot: EngineSnapshot) -> None:
        self.written.append(snapshot)
        if self.failure is not None:
            raise self.failure

    def has_written(self, count: int) -> Callable[[], Awaitable[bool]]:
        async def written() -> bool:
            return len(self.written) >= count

        return written


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes snapshots come at once, for tests that do not count them."""
    for name in ("INTERVAL_S", "IDLE_INTERVAL_S", "STEP_PATIENCE_S"):
        monkeypatch.setattr(snapshot_reporter, name, 0.001)


async def test_no_snapshot_is_taken_while_no_console_watches() -> None:
    rig = Rig()
    await rig.reporter.close()
    assert rig.captured == 0


async def test_a_snapshot_has_what_a_console_shows() -> None:
    rig = Rig()
    rig.steps.add(STATS, 0.25, 1.0, output_tokens=7)
    rig.reporter.watch(60)
    await eventually(rig.has_written(1))
    await rig.reporter.close()
    found = rig.written[0]
    assert (found.steps, found.step_seconds) == (1, 0.25)
    assert (found.running, found.waiting, found.preemptions) == (1, 3, 5)
    kv = found.kv
    assert (kv.total, kv.used, kv.shared, kv.cached, kv.free) == (10, 6, 2, 3, 1)
    (sequence,) = found.sequences
    assert sequence.request_id == rig.leased.request_id, "not the engine's own name for it"
    assert (sequence.tenant, sequence.state, sequence.output) == ("default", "decode", 3)
    assert found.sequences_left_out == 3


async def test_rates_are_of_the_last_snapshots() -> None:
    rig = Rig()
    rig.reporter.watch(60)
    await eventually(rig.has_written(1))
    rig.steps.add(STATS, 0.25, 1.0, output_tokens=7)
    seen = len(rig.written)
    await eventually(rig.has_written(seen + 2))
    await rig.reporter.close()
    after = rig.written[seen : seen + 2]
    assert any(one.output_rate > one.prompt_rate > 0 for one in after)


async def test_snapshots_end_when_consoles_stop_watching() -> None:
    rig = Rig()
    rig.reporter.watch(0.001)

    async def ended() -> bool:
        return rig.reporter._task is not None and rig.reporter._task.done()

    await eventually(ended)
    count = rig.captured
    rig.reporter.watch(60)
    await eventually(rig.has_written(count + 1))
    await rig.reporter.close()


async def test_no_console_watches_for_longer_than_it_may() -> None:
    rig = Rig()
    rig.reporter.watch(1e9)
    assert rig.reporter._until < asyncio.get_running_loop().time() + 60
    await rig.reporter.close()


async def test_while_a_step_takes_long_the_last_snapshot_is_repeated() -> None:
    rig = Rig()
    rig.reporter.watch(60)
    await eventually(rig.has_written(1))
    rig.hangs = True
    await eventually(rig.has_written(len(rig.written) + 5))
    captured = rig.captured
    await eventually(rig.has_written(len(rig.written) + 5))
    await rig.reporter.close()
    assert rig.captured == captured, "the engine's thread is asked once"


async def test_snapshots_continue_after_an_outage_of_redis() -> None:
    rig = Rig()
    rig.failure = BackendUnavailable("redis: away")
    rig.reporter.watch(60)
    await eventually(rig.has_written(3))
    await rig.reporter.close()


@pytest.mark.parametrize("failure", [BackendUnfit("redis: not allowed"), ValueError("a bug")])
async def test_a_fault_in_snapshots_does_not_affect_the_engine(failure: Exception) -> None:
    rig = Rig()
    rig.failure = failure
    rig.reporter.watch(60)
    await eventually(rig.has_written(1))
    task: Any = rig.reporter._task
    await asyncio.wait((task,))
    assert task.exception() is None
    rig.reporter.watch(60)
    await rig.reporter.close()
    assert len(rig.written) == 1, "it does not try again"
