"""Host memory for KV blocks that were swapped out, and the copies to it and back.

Does what a plan says; which block lies where is the scheduler's to decide.
"""

from time import perf_counter

import torch

from .attention.base import LayerCache
from .attention.memory import host_blocks, move_blocks
from .config import EngineConfig
from .kv_budget import count_host_blocks
from .placement import PeerRanks
from .plan import StepPlan
from .timing import Times, begin_times


class HostPool:
    """As much of the swap space as whole blocks of `caches` fill; pinned memory beside a GPU.

    `peers` do the same with theirs. Raises ConfigError where the machine has not that much memory.
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

    def swap(self, plan: StepPlan) -> Times | None:
        """Makes the plan's copies out, then those in, in the order of the device's stream; how long
        they take, or None where there are none. Does not wait for a GPU."""
        if not plan.swap_out and not plan.swap_in:
            return None
        times = begin_times(self._device, perf_counter)
        if self._peers is not None:
            self._peers.swap(plan.swap_out, plan.swap_in)
        for cache, host in zip(self._caches, self._host, strict=True):
            move_blocks(cache, host, plan.swap_out)
            move_blocks(host, cache, plan.swap_in)
        times.end()
        return times

    def synchronize(self) -> None:
        """Waits for the device, so that what is timed is over."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
