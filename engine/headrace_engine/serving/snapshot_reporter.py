"""Writes snapshots of the batch to Redis, only while a console watches.

The engine's thread takes each snapshot between two steps; the rest happens on the event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from headrace_common.errors import BackendUnavailable, HeadraceError
from headrace_common.protocol.live import (
    MAX_SEQUENCES,
    MAX_WATCH_MS,
    EngineSnapshot,
    KVBlocks,
    SequenceSnapshot,
    SnapshotWriter,
)

from ..core.batch_snapshot import BatchSnapshot, SequenceProgress
from ..engine.engine_loop import EngineLoop
from .leased_request import LeasedRequest
from .step_log import StepLog

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25
# The snapshots of an idle engine do not change, and only show that it is alive.
IDLE_INTERVAL_S = 1.0
RATE_WINDOW = 5  # the number of snapshots over which rates are measured
# During a step that takes longer, the state before it is shown.
STEP_PATIENCE_S = 1.0


class _Tokens(NamedTuple):
    at: float
    prompt: int
    output: int


class SnapshotReporter:
    """Takes and writes snapshots while consoles watch. `requests` are those that run."""

    def __init__(
        self,
        loop: EngineLoop,
        steps: StepLog,
        requests: Mapping[str, LeasedRequest],
        writer: SnapshotWriter,
        block_size: int,
    ) -> None:
        self._loop = loop
        self._steps = steps
        self._requests = requests
        self._writer = writer
        self._block_size = block_size
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._counted: deque[_Tokens] = deque(maxlen=RATE_WINDOW)
        self._refused = False

    def watch(self, seconds: float) -> None:
        """Writes snapshots for `seconds` from now on, at most MAX_WATCH_MS."""
        if self._refused:
            return
        self._until = max(self._until, time.monotonic() + min(seconds, MAX_WATCH_MS / 1000))
        if self._task is None or self._task.done():
            self._counted.clear()
            self._task = asyncio.create_task(self._report(), name="snapshots")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _report(self) -> None:
        try:
            await self._write_snapshots()
        except HeadraceError as error:  # the Redis user of an older chart must not write snapshots
            self._refused = True
            logger.warning("no snapshots for consoles", extra={"error": str(error)})
        except Exception:  # an error of a console must not end the engine
            self._refused = True
            logger.exception("no snapshots for consoles")

    async def _write_snapshots(self) -> None:
        capture: asyncio.Future[BatchSnapshot] | None = None
        snapshot: EngineSnapshot | None = None
        while time.monotonic() < self._until:
            capture = capture or self._capture()
            await asyncio.wait((capture,), timeout=STEP_PATIENCE_S)
            if capture.done():
                snapshot, capture = self._snapshot(capture.result()), None
            if snapshot is not None:
                try:
                    await self._writer.write(snapshot)
                except BackendUnavailable as error:
                    logger.debug("snapshot not written", extra={"error": str(error)})
            await asyncio.sleep(INTERVAL_S if self._loop.busy else IDLE_INTERVAL_S)

    def _capture(self) -> "asyncio.Future[BatchSnapshot]":
        loop = asyncio.get_running_loop()
        captured: asyncio.Future[BatchSnapshot] = loop.create_future()

        def done(batch: BatchSnapshot) -> None:
            if not captured.done():
                captured.set_result(batch)

        def on_captured(batch: BatchSnapshot) -> None:  # in the engine's thread
            loop.call_soon_threadsafe(done, batch)

        self._loop.capture(MAX_SEQUENCES, on_captured)
        return captured

    def _snapshot(self, batch: BatchSnapshot) -> EngineSnapshot:
        stats, last = batch.stats, self._steps.last
        prompt_rate, output_rate = self._rates()
        total = stats.blocks_used + stats.blocks_cached + stats.blocks_free
        found = [self._sequence(progress) for progress in batch.sequences]
        return EngineSnapshot(
            time=time.time(),
            steps=self._steps.steps,
            step_seconds=0.0 if last is None else last.seconds,
            output_rate=output_rate,
            prompt_rate=prompt_rate,
            running=stats.running,
            waiting=stats.waiting + stats.swapped,
            preemptions=stats.preemptions + stats.swaps,
            kv=KVBlocks(
                total=total,
                used=stats.blocks_used,
                shared=batch.blocks_shared,
                cached=stats.blocks_cached,
                free=stats.blocks_free,
                block_tokens=self._block_size,
            ),
            sequences=tuple(sequence for sequence in found if sequence is not None),
            sequences_left_out=batch.left_out,
        )

    def _rates(self) -> tuple[float, float]:
        """Tokens of prompts and of outputs per second over the last snapshots."""
        now = time.monotonic()
        self._counted.append(_Tokens(now, self._steps.prompt_tokens, self._steps.output_tokens))
        first, last = self._counted[0], self._counted[-1]
        seconds = last.at - first.at
        if seconds <= 0:
            return 0.0, 0.0
        return (last.prompt - first.prompt) / seconds, (last.output - first.output) / seconds

    def _sequence(self, progress: SequenceProgress) -> SequenceSnapshot | None:
        """None if the request has already ended."""
        leased = self._requests.get(progress.request_id)
        if leased is None:
            return None
        return SequenceSnapshot(
            request_id=leased.request_id,
            tenant=leased.request.tenant,
            choice=progress.choice,
            state=progress.phase,
            prompt=progress.prompt,
            computed=progress.computed,
            output=progress.output,
            max_output=progress.max_output,
            step_tokens=progress.step_tokens,
            age=max(0.0, time.time() - leased.times.taken_ns / 1e9),
        )
