"""A log of the engine's last steps, for its debug pages.

The worker writes it after each step; any thread may read it. It is bounded and has no user's
content.
"""

from collections import deque
from dataclasses import dataclass

from ..core.stats import SchedulerStats

MAX_RECORDS = 512


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: its end (Unix seconds), duration and tokens, and the engine's state after it.

    Batches are ragged, so no token is padding. `kv_waste` is unused divided by used KV slots.
    """

    step: int
    ended: float
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    swapped: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    kv_waste: float
    preemptions: int
    swaps: int


class StepLog:
    """A ring buffer of `size` records. `steps` and tokens count all since the start."""

    def __init__(self, size: int = MAX_RECORDS) -> None:
        self._records: deque[StepRecord] = deque(maxlen=size)
        self.steps = 0
        self.prompt_tokens = 0
        self.output_tokens = 0

    @property
    def last(self) -> StepRecord | None:
        return self._records[-1] if self._records else None

    def add(
        self, stats: SchedulerStats, seconds: float, ended: float, output_tokens: int = 0
    ) -> None:
        self.steps += 1
        self.prompt_tokens += stats.step_prefill_tokens
        self.output_tokens += output_tokens
        self._records.append(
            StepRecord(
                step=self.steps,
                ended=ended,
                seconds=seconds,
                prefill_tokens=stats.step_prefill_tokens,
                decode_tokens=stats.step_decode_tokens,
                running=stats.running,
                waiting=stats.waiting,
                swapped=stats.swapped,
                blocks_used=stats.blocks_used,
                blocks_cached=stats.blocks_cached,
                blocks_free=stats.blocks_free,
                kv_waste=stats.kv_waste,
                preemptions=stats.preemptions,
                swaps=stats.swaps,
            )
        )

    def records(self) -> list[StepRecord]:
        """Oldest first."""
        return list(self._records)
