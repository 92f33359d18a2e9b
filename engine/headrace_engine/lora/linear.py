"""The adapters' matrices of one linear layer, at addresses that never change."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .modules import Factors
from .shapes import LinearShape


@dataclass(frozen=True, slots=True)
class Part:
    """One module: its columns in the product A x (`inner`) and in the layer's outputs, and its B,
    transposed (`up`)."""

    inner: slice
    outputs: slice
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class SlotMatrices:
    """A of all modules of a layer, stacked and transposed [in, ranks], and the modules."""

    down: torch.Tensor
    parts: tuple[Part, ...]


class LoRALinear:
    """Memory, in each slot, for the matrices that any adapter has for one linear layer.

    down     [slots, parts * max_rank, in]   A of the adapter's modules, stacked
    up       [slots, max_rank, out]          B transposed, in the columns of each module
    ends     int32 [slots, parts]            where each module's rows of `down` end
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
        # The modules of a layer have separate columns, so one matrix holds all of them.
        self.up = torch.zeros(slots, max_rank, shape.outputs, dtype=dtype, device=device)
        self.ends = torch.zeros(slots, parts, dtype=torch.int32, device=device)
        self._matrices: list[SlotMatrices | None] = [None] * slots

    def matrices(self, slot: int) -> SlotMatrices | None:
        """The matrices in a slot; None if the adapter does not change this layer."""
        return self._matrices[slot]

    def put(self, slot: int, modules: Mapping[str, Factors]) -> None:
        """Replaces the content of a slot with this process's part of an adapter's matrices.

        The copies run on the device after all work that was queued before.
        """
        parts: list[Part] = []
        ends: list[int] = []
        end = 0
        for name, columns in self.shape.parts.items():
            factors = modules.get(name)
            if factors is not None:
                start, rank = end, factors.down.shape[0]
                end += rank
                outputs = slice(columns.start, columns.start + columns.width)
                self.down[slot, start:end].copy_(self.shape.local.of(factors.down))
                up = self.up[slot, :rank, outputs].copy_(columns.local.of(factors.up))
                parts.append(Part(slice(start, end), outputs, up))
            ends.append(end)
        self.ends[slot].copy_(torch.tensor(ends, dtype=torch.int32))
        self._matrices[slot] = (
            SlotMatrices(self.down[slot, :end].T, tuple(parts)) if parts else None
        )
