"""The adapters of one step: which rows of the batch each of them changes, and their weights.

A row's result is W x + scale * B (A x): the first is the model's own product for all rows, the rest
is added here, a group of rows with one adapter at a time.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import torch

from .shapes import LinearName


@dataclass(frozen=True, slots=True)
class LoRARows:
    """The rows of one adapter, which lies in `slot`: a run of rows, or an int64 tensor of them."""

    slot: int
    rows: slice | torch.Tensor


class LinearDelta(Protocol):
    """What the adapters in the slots add to one linear layer."""

    def add(self, groups: Rows[LoRARows], x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds to the rows of y [T, out] what each group's adapter makes of x [T, in]."""


@dataclass(frozen=True, slots=True)
class LayerLoRA:
    """One decoder layer's part in a step."""

    linears: Mapping[LinearName, LinearDelta]
    groups: Rows[LoRARows]

    def add(self, name: LinearName, x: torch.Tensor, y: torch.Tensor) -> None:
        """Changes `y`, the product of the layer's own weights and `x`, in place."""
        linear = self.linears.get(name)
        if linear is not None:
            linear.add(self.groups, x, y)


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """`tokens` are the groups of a step's T rows, `logits` those of its R rows that sample."""

    layers: Rows[Mapping[LinearName, LinearDelta]]
    tokens: tuple[LoRARows, ...]
    logits: tuple[LoRARows, ...]

    def of_tokens(self, index: int) -> LayerLoRA:
        """Layer `index` while it computes all rows."""
        return LayerLoRA(self.layers[index], self.tokens)

    def of_logits(self, index: int) -> LayerLoRA:
        """Layer `index` while it computes only the rows that sample."""
        return LayerLoRA(self.layers[index], self.logits)
