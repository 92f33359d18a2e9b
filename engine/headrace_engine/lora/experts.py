"""The adapters' matrices of a mixture's experts, stacked, at addresses that never change.

Gate and up are one module of twice the rank, as PEFT merges them if the model does.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from .linear import Part, SlotMatrices
from .modules import Factors
from .shapes import LinearShape


class LinearAdapters(Protocol):
    """The adapters' matrices of one linear layer, or of one expert's."""

    def matrices(self, slot: int) -> SlotMatrices | None:
        """The matrices in a slot; None if the adapter does not change this layer."""


class LoRAExperts:
    """Memory for the adapters' matrices in a layer's experts of this process. Each adapter has a
    slot.

    down   [slots, experts, max_rank, in]    A, up to an adapter's rank
    up     [slots, experts, max_rank, out]   B transposed, likewise
    ranks  int32 [slots]                     0: the adapter in it does not change this layer
    """

    def __init__(
        self,
        shape: LinearShape,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape, self.max_rank = shape, max_rank
        room = (slots, len(shape.local_experts), max_rank)
        self.down = torch.zeros(*room, shape.inputs, dtype=dtype, device=device)
        self.up = torch.zeros(*room, shape.outputs, dtype=dtype, device=device)
        self.ranks = torch.zeros(slots, dtype=torch.int32, device=device)
        self._ranks = [0] * slots

    def rank(self, slot: int) -> int:
        return self._ranks[slot]

    def of(self, expert: int) -> LinearAdapters:
        """The adapters of one of this process's experts, which are numbered from 0."""
        return _Expert(self, expert)

    def put(self, slot: int, factors: Factors | None) -> None:
        """Copies this process's part of the matrices of all experts [experts, rank, ...] into a
        slot.

        The device copies after all work that was launched before.
        """
        rank = 0 if factors is None else factors.down.shape[1]
        if factors is not None:
            (columns,) = self.shape.parts.values()
            first, stop = self.shape.local_experts.start, self.shape.local_experts.stop
            self.down[slot, :, :rank].copy_(self.shape.local.of(factors.down[first:stop]))
            self.up[slot, :, :rank].copy_(columns.local.of(factors.up[first:stop]))
        self._ranks[slot] = rank
        self.ranks[slot].fill_(rank)


@dataclass(frozen=True, slots=True)
class _Expert:
    experts: LoRAExperts
    number: int

    def matrices(self, slot: int) -> SlotMatrices | None:
        own, rank = self.experts, self.experts.rank(slot)
        if not rank:
            return None
        up = own.up[slot, self.number, :rank]
        every = slice(0, own.shape.outputs)
        return SlotMatrices(
            own.down[slot, self.number, :rank].T, (Part(slice(0, rank), every, up),)
        )
