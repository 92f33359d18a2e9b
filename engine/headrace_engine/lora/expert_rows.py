"""Adapters of a mixture's experts by torch's products: the rows of one adapter and one expert at a
time, in an order that the host knows."""

from dataclasses import dataclass

import numpy as np
import torch

from .batch import NO_ADAPTER, BlockLinear, BlockLoRA, LayerLoRA, RowSlots
from .groups import GroupedProducts, GroupedRows


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """A step's rows in the order of their experts, each with the slot of its adapter."""

    layer: LayerLoRA
    slots: RowSlots
    device: torch.device

    @classmethod
    def of(cls, layer: LayerLoRA | None, tokens: torch.Tensor) -> "ExpertRows | None":
        """`tokens` int64 [N] names the token of each row. Waits for the device. None if no adapter
        changes experts."""
        if layer is None or not layer.experts:
            return None
        assert layer.owners is not None, "such steps are not recorded"
        return cls(layer, layer.owners[tokens.cpu().numpy()], tokens.device)

    def part(self, expert: int, start: int, stop: int) -> BlockLoRA | None:
        """Rows [start, stop), which this expert computes; None if none has an adapter."""
        slots = self.slots[start:stop]
        if np.all(slots == NO_ADAPTER):
            return None
        return _OneExpert(self.layer, expert, GroupedProducts(self.device).rows(slots))


@dataclass(frozen=True, slots=True)
class _OneExpert:
    layer: LayerLoRA
    expert: int
    rows: GroupedRows

    def add(self, name: BlockLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        experts = self.layer.experts["experts_gate_up" if name == "gate_up" else "experts_down"]
        self.rows.add(experts.of(self.expert), x, y)
