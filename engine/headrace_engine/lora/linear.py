"""The adapters' matrices of one linear layer, at addresses that stay whatever adapter comes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .modules import Factors
from .shapes import LinearShape


@dataclass(frozen=True, slots=True)
class Part:
    """One module: its columns of A x, its columns of the layer's outputs, and B transposed."""

    inner: slice
    outputs: slice
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class Placed:
    """A of all modules of a layer below each other, transposed [in, ranks], and the modules."""

    down: torch.Tensor
    parts: tuple[Part, ...]


class LoRALinear:
    """Room in each slot for any adapter's part in one linear layer.

    down     [slots, parts * max_rank, in]   A of the modules that there are, below each other
    up       [slots, max_rank, out]          B transposed, in the columns that each module has
    ends     int32 [slots, parts]          where each module's rows of `down` end
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
        parts = len(shape.parts)
        self.down = torch.zeros(slots, parts * max_rank, shape.inputs, dtype=dtype, device=device)
        # Modules have columns of their own, so that all of a layer fit side by side.
        self.up = torch.zeros(slots, max_rank, shape.outputs, dtype=dtype, device=device)
        self.ends = torch.zeros(slots, parts, dtype=torch.int32, device=device)
        self._placed: list[Placed | None] = [None] * slots

    def placed(self, slot: int) -> Placed | None:
        """What lies in a slot; None: nothing of this layer."""
        return self._placed[slot]

    def put(self, slot: int, modules: Mapping[str, Factors]) -> None:
        """Writes what is held here of an adapter's matrices into a slot, over those that were
        there, behind all that the device was given before."""
        parts: list[Part] = []
        ends: list[int] = []
        end = 0
        for name, columns in self.shape.parts.items():
            factors = modules.get(name)
            if factors is not None:
                start, rank = end, factors.down.shape[0]
                end += rank
                outputs = slice(columns.start, columns.start + columns.width)
                self.down[slot, start:end].copy_(self.shape.held.of(factors.down))
                up = self.up[slot, :rank, outputs].copy_(columns.held.of(factors.up))
                parts.append(Part(slice(start, end), outputs, up))
            ends.append(end)
        self.ends[slot].copy_(torch.tensor(ends, dtype=torch.int32))
        self._placed[slot] = Placed(self.down[slot, :end].T, tuple(parts)) if parts else None
