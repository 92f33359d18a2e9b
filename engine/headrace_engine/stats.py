"""What a scheduler says of itself after a step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Sequences by state, blocks by use, totals since the start, and the last step's tokens.

    `blocks_cached` are free blocks whose content can still be hit; `blocks_free` hold nothing.
    Prefix-cache tokens are counted at a sequence's first admission, not when it is recomputed.
    """

    running: int
    waiting: int
    swapped: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    preemptions: int
    prefix_hit_tokens: int
    prefix_miss_tokens: int
    step_prefill_tokens: int
    step_decode_tokens: int

    @property
    def kv_utilization(self) -> float:
        """Share of the blocks that are used, 0 to 1."""
        return self.blocks_used / (self.blocks_used + self.blocks_cached + self.blocks_free)
