"""Reads and writes recurrent states in the blocks of the KV cache.

A cache's tensors are read as bytes, whatever the attention backend stores in them. A block's bytes
are those of its part of each tensor, one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..core.attention_backend import LayerCache
from ..core.recurrent_state import StateBatch, StateLayout


@dataclass(frozen=True, slots=True)
class StateMemory:
    """The states of one step, which are stored in `caches`, the caches of the layers with KV."""

    layout: StateLayout
    caches: Sequence[LayerCache]
    batch: StateBatch

    def read(self, layer: int) -> list[torch.Tensor]:
        """The states before the step: each tensor of the layer's state as [S, ...]."""
        part, batch = self.layout.part(layer), self.batch
        blocks = batch.sources[:, part]
        count, pages = blocks.shape
        found = [
            page.index_select(0, blocks.flatten()).view(count, pages, -1)
            for page in self._pages(layer)
        ]
        whole, states, begin = torch.cat(found, dim=2).view(count, -1), [], 0
        for tensor in self.layout.tensors:
            used = prod(tensor.shape) * tensor.dtype.itemsize
            state = whole[:, begin : begin + used].contiguous().view(tensor.dtype)
            state = state.view(count, *tensor.shape)
            begin += tensor.num_bytes
            fresh = batch.fresh.view(-1, *[1] * len(tensor.shape))
            states.append(state.masked_fill(fresh, 0.0))
        return states

    def write(self, layer: int, states: Sequence[torch.Tensor]) -> None:
        """Writes each tensor [W, ...] of the layer's state to the targets of the step."""
        blocks = self.batch.targets[:, self.layout.part(layer)]
        count, pages = blocks.shape
        whole = states[0].new_zeros(count, pages * self.layout.block_bytes, dtype=torch.uint8)
        begin = 0
        for tensor, state in zip(self.layout.tensors, states, strict=True):
            content = state.to(tensor.dtype).contiguous().view(count, -1).view(torch.uint8)
            whole[:, begin : begin + content.shape[1]] = content
            begin += tensor.num_bytes
        rows, begin = whole.view(count * pages, -1), 0
        for page in self._pages(layer):
            width = page.shape[1]
            page.index_copy_(0, blocks.flatten(), rows[:, begin : begin + width])
            begin += width

    def _pages(self, layer: int) -> list[torch.Tensor]:
        """The memory of the layer's place: for each tensor of the cache, bytes [blocks, bytes]."""
        cache = self.caches[self.layout.place(layer)]
        return [part.flatten(1).view(torch.uint8) for part in cache if part.numel()]
