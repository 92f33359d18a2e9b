"""Host memory for swapped KV blocks, and the copies to it and back.

The scheduler decides which block is stored where.
"""

from time import perf_counter

import torch

from ..attention.memory import host_blocks, move_blocks
from ..core.attention_backend import LayerCache
from ..core.config import EngineConfig
from ..core.step_plan import SchedulerOutput
from ..device.timing import Times, begin_times
from ..kv_cache.memory_budget import count_host_blocks
from ..models.placed_model import PeerRanks


class HostKVCache:
    """The swap space as blocks of the same size as those of `caches`; pinned memory if on a GPU.

    `peers` (other ranks) do the same. Raises ConfigError if the machine has too little memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        caches: tuple[LayerCache, ...],
        peers: PeerRanks | None = None,
    ) -> None:
        self._caches, self._peers = caches, peers
        self._device = caches[0][0].device
        self.bytes_per_block = sum(
            part[0].numel() * part.element_size() for cache in caches for part in cache
        )
        self.num_blocks = count_host_blocks(config, self._device, self.bytes_per_block)
        if peers is not None:
            peers.reserve_host(self.num_blocks)
        self._host = tuple(host_blocks(cache, self.num_blocks) for cache in caches)

    def swap(self, scheduler_output: SchedulerOutput) -> Times | None:
        """Copies the step's blocks out and then in, in the order of the device's stream.

        Returns their timer, or None if there are no copies. Does not wait for a GPU.
        """
        if not scheduler_output.swap_out and not scheduler_output.swap_in:
            return None
        times = begin_times(self._device, perf_counter)
        if self._peers is not None:
            self._peers.swap(scheduler_output.swap_out, scheduler_output.swap_in)
        for cache, host in zip(self._caches, self._host, strict=True):
            move_blocks(cache, host, scheduler_output.swap_out)
            move_blocks(host, cache, scheduler_output.swap_in)
        times.end()
        return times

    def synchronize(self) -> None:
        """Waits for the device, so that a measured step is complete."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
