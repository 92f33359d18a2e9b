"""A snapshot of a scheduler's sequences and blocks between two steps, for consoles and debug
pages."""

from dataclasses import dataclass

from .stats import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceProgress:
    """One unfinished choice. Numbers are tokens; the last step computed `step_tokens` of them.

    `phase` is waiting, prefill, decode, preempted or swapped. A sequence that was preempted and
    computes its KV again is in prefill.
    """

    request_id: str
    choice: int
    phase: str
    prompt: int
    computed: int
    output: int
    max_output: int
    step_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSnapshot:
    """The statistics, the sequences, running ones first, and how many more there are."""

    stats: SchedulerStats
    blocks_shared: int
    sequences: tuple[SequenceProgress, ...]
    left_out: int
