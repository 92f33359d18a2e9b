"""Statistics of a scheduler after a step."""

from dataclasses import dataclass

from .speculative_stats import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKVStats:
    """Blocks, bytes and seconds of the shared tier since the start.

    `blocks_hit` and `blocks_missed` were looked up. `blocks_failed` were found, but not read in
    time or not as they were written. `blocks_skipped` were not written, because too many were
    waiting or the store failed. `bytes_in` were read, `bytes_out` written.
    """

    blocks_hit: int = 0
    blocks_missed: int = 0
    blocks_failed: int = 0
    blocks_skipped: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds_in: float = 0.0
    seconds_out: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Sequences by state, blocks by use, totals since the start, and the last step's tokens.

    `blocks_cached` counts free blocks that are in the prefix cache, `blocks_free` the other free
    blocks. `preemptions` counts sequences that are recomputed, `swaps` those copied to host memory;
    `swap_out_bytes` and `swap_in_bytes` count what was copied. `host_blocks_free` includes cached
    host blocks. `kv_slots_used` counts token positions with KV in used blocks, `kv_slots_unused`
    the other positions in them. `speculation` is None without speculative decoding.
    Prefix-cache tokens are counted when a sequence starts first, not when it is recomputed.
    `host_hit_tokens` and `shared_hit_tokens` of the hits came from host memory and from the shared
    tier. `swap_seconds` is the time that steps waited for copies to and from host memory. `shared`
    is None without that tier. `image_tokens_encoded` counts the tokens of the images that were
    encoded, which took `encode_seconds`. `encoder_cache_queries` counts images that prompts began
    to read, and `encoder_cache_hits` those of them that were encoded already.
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
    host_hit_tokens: int = 0
    shared_hit_tokens: int = 0
    swap_seconds: float = 0.0
    shared: SharedKVStats | None = None
    images_encoded: int = 0
    image_tokens_encoded: int = 0
    encode_seconds: float = 0.0
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0

    @property
    def device_hit_tokens(self) -> int:
        """Tokens whose KV was in the device's prefix cache."""
        return self.prefix_hit_tokens - self.external_hit_tokens

    @property
    def external_hit_tokens(self) -> int:
        """Tokens whose KV came from host memory or from the shared tier."""
        return self.host_hit_tokens + self.shared_hit_tokens

    @property
    def kv_waste(self) -> float:
        """Unused slots of used blocks divided by used slots; 0 if nothing is used."""
        return self.kv_slots_unused / self.kv_slots_used if self.kv_slots_used else 0.0

    @property
    def kv_utilization(self) -> float:
        """Share of blocks that sequences use, 0 to 1; cached blocks count as free."""
        return self.blocks_used / (self.blocks_used + self.blocks_cached + self.blocks_free)
