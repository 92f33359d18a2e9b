"""What a scheduler says of itself after a step."""

from dataclasses import dataclass

from .speculation.stats import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Sequences by state, blocks by use, totals since the start, and the last step's tokens.

    `blocks_cached` are free blocks whose content can still be hit; `blocks_free` hold nothing.
    `preemptions` were by recompute, `swaps` by a copy to host memory; `swap_out_bytes` and
    `swap_in_bytes` are what was copied. `host_blocks_free` can all be taken, whatever they hold.
    `kv_slots_used` are token positions with KV in used blocks, `kv_slots_unused` the others there.
    `speculation` is None where that is off.
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
    swaps: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    host_blocks_used: int = 0
    host_blocks_free: int = 0
    kv_slots_used: int = 0
    kv_slots_unused: int = 0
    speculation: SpeculationStats | None = None

    @property
    def kv_waste(self) -> float:
        """Unused slots of used blocks over used ones; 0 where nothing is used."""
        return self.kv_slots_unused / self.kv_slots_used if self.kv_slots_used else 0.0

    @property
    def kv_utilization(self) -> float:
        """Share of the blocks that are used, 0 to 1."""
        return self.blocks_used / (self.blocks_used + self.blocks_cached + self.blocks_free)
