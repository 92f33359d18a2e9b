"""Statistics of a scheduler after a step."""

from dataclasses import dataclass

from .speculative_stats import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Sequences by state, blocks by use, totals since the start, and the last step's tokens.

    `blocks_cached` counts free blocks that are in the prefix cache, `blocks_free` the other free
    blocks. `preemptions` counts sequences that are recomputed, `swaps` those copied to host memory;
    `swap_out_bytes` and `swap_in_bytes` count what was copied. `host_blocks_free` includes cached
    host blocks. `kv_slots_used` counts token positions with KV in used blocks, `kv_slots_unused`
    the other positions in them. `speculation` is None without speculative decoding.
    Prefix-cache tokens are counted when a sequence starts first, not when it is recomputed.
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
        """Unused slots of used blocks divided by used slots; 0 if nothing is used."""
        return self.kv_slots_unused / self.kv_slots_used if self.kv_slots_used else 0.0

    @property
    def kv_utilization(self) -> float:
        """Share of blocks that sequences use, 0 to 1; cached blocks count as free."""
        return self.blocks_used / (self.blocks_used + self.blocks_cached + self.blocks_free)
