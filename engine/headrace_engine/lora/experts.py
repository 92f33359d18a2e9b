"""The adapters' matrices of a mixture's experts: those of all experts next to each other, at
addresses that stay whatever adapter comes.

Gate and up are one module of twice the rank, as PEFT joins them where a model has them joined.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from .linear import Part, Placed
from .modules import Factors
from .shapes import LinearShape

# What gate and up take of the largest rank: each the whole.
JOINED = 2


class AnyPlaced(Protocol):
    """Matrices of one linear layer."""

    def placed(self, slot: int) -> Placed | None:
        """What lies in a slot; None: nothing of this layer."""


class LoRAExperts:
    """Room in each slot for any adapter's part in all experts of a layer.

    down   [slots, experts, max_rank, in]    A, as far as an adapter's rank goes
    up     [slots, experts, max_rank, out]   B transposed, likewise
    ranks  int32 [slots]                     0: the adapter in it changes nothing here
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
        room = (slots, shape.experts, max_rank)
        self.down = torch.zeros(*room, shape.inputs, dtype=dtype, device=device)
        self.up = torch.zeros(*room, shape.outputs, dtype=dtype, device=device)
        self.ranks = torch.zeros(slots, dtype=torch.int32, device=device)
        self._ranks = [0] * slots

    def rank(self, slot: int) -> int:
        return self._ranks[slot]

    def of(self, expert: int) -> AnyPlaced:
        return _Expert(self, expert)

    def put(self, slot: int, factors: Factors | None) -> None:
        """Writes what is held here of matrices [experts, rank, ...] into a slot, behind all that
        the device was given before."""
        rank = 0 if factors is None else factors.down.shape[1]
        if factors is not None:
            (columns,) = self.shape.parts.values()
            self.down[slot, :, :rank].copy_(self.shape.held.of(factors.down))
            self.up[slot, :, :rank].copy_(columns.held.of(factors.up))
        self._ranks[slot] = rank
        self.ranks[slot].fill_(rank)


@dataclass(frozen=True, slots=True)
class _Expert:
    experts: LoRAExperts
    number: int

    def placed(self, slot: int) -> Placed | None:
        own, rank = self.experts, self.experts.rank(slot)
        if not rank:
            return None
        up = own.up[slot, self.number, :rank]
        every = slice(0, own.shape.outputs)
        return Placed(own.down[slot, self.number, :rank].T, (Part(slice(0, rank), every, up),))
