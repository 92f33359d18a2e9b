"""Host memory for KV blocks of swapped sequences and of prefixes, and the copies to it and back.

The scheduler decides which block is stored where.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..attention.memory import host_blocks, move_blocks
from ..core.attention_backend import LayerCache
from ..core.config import EngineConfig
from ..core.step_plan import SchedulerOutput
from ..device.timing import Times, begin_times
from ..kv_cache.memory_budget import count_host_blocks
from ..models.placed_model import PeerRanks

Moves = Sequence[tuple[int, int]]
Rows = list[npt.NDArray[np.uint8]]


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
        # torch's constructor of streams is not annotated.
        make_stream: Any = torch.cuda.Stream
        self._stream: Any = make_stream(self._device) if self._device.type == "cuda" else None
        self._saving = False  # whether the stream may still read blocks of the device
        self._rows = _rows(self._host)
        self._device_rows = _rows(caches) if self._device.type == "cpu" else []

    @property
    def layout(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of a block in each tensor."""
        return [(tuple(part.shape[1:]), part.dtype) for cache in self._host for part in cache]

    def buffers(self, block: int) -> list[memoryview]:
        """The memory of a host block, one buffer for each tensor of a layer's cache."""
        return [memoryview(rows[block]) for rows in self._rows]

    def swap(self, scheduler_output: SchedulerOutput) -> Times | None:
        """Copies the step's blocks out and then in, in the order of the device's stream.

        Returns their timer, or None if there are no copies. Does not wait for a GPU.
        """
        if self._saving:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._saving = False
        if not scheduler_output.swap_out and not scheduler_output.swap_in:
            return None
        times = begin_times(self._device, perf_counter)
        if self._peers is not None:
            self._peers.swap(scheduler_output.swap_out, scheduler_output.swap_in)
        self._copy_out(scheduler_output.swap_out)
        if self._device_rows:
            _copy_rows(self._rows, self._device_rows, scheduler_output.swap_in)
        else:
            for cache, host in zip(self._caches, self._host, strict=True):
                move_blocks(host, cache, scheduler_output.swap_in)
        times.end()
        return times

    def save(self, scheduler_output: SchedulerOutput) -> Times | None:
        """Copies the step's saved blocks to host memory; on a GPU while the step computes.

        Called after `swap`. The next step's `swap` lets the device wait for these copies, since
        that step may overwrite their blocks. Returns their timer, or None if there are none.
        """
        saves = scheduler_output.saves
        if not saves:
            return None
        if self._peers is not None:
            self._peers.swap(saves, ())
        if self._stream is None:
            return self._save(saves)
        self._saving = True
        # What is saved was written by the steps before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return self._save(saves)

    def _save(self, saves: Moves) -> Times:
        times = begin_times(self._device, perf_counter)
        self._copy_out(saves)
        times.end()
        return times

    def _copy_out(self, moves: Moves) -> None:
        if self._device_rows:
            _copy_rows(self._device_rows, self._rows, moves)
            return
        for cache, host in zip(self._caches, self._host, strict=True):
            move_blocks(cache, host, moves)

    def synchronize(self) -> None:
        """Waits for the device, so that a measured step is complete."""
        if self._stream is not None:
            torch.cuda.synchronize(self._device)


def _rows(caches: Sequence[LayerCache]) -> Rows:
    """The bytes of each block in each tensor of the caches."""
    parts = [part for cache in caches for part in cache if part.numel()]
    return [part.view(len(part), -1).view(torch.uint8).numpy() for part in parts]


def _copy_rows(source: Rows, destination: Rows, moves: Moves) -> None:
    """Copies whole blocks (from, to): torch's copies cost more than the bytes of a small block."""
    for from_rows, to_rows in zip(source, destination, strict=True):
        for begin, to in moves:
            to_rows[to] = from_rows[begin]
