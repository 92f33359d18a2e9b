"""The adapters of one step: which rows of the batch each of them changes.

A row's result is W x + scale * B (A x): the first is the model's own product for all rows, the rest
is added here to the rows that have an adapter.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from ..transfer import Array
from .linear import LoRALinear
from .shapes import LinearName

NO_ADAPTER = -1

# Arrays of the host as tensors of the device: transfer.Transfer.
Move = Callable[[Rows[Array]], list[torch.Tensor]]
# The slot of each row's adapter, or NO_ADAPTER.
RowSlots = npt.NDArray[np.int64]


class AdaptedRows(Protocol):
    """Which rows have which adapter, as the products of a device want to know it."""

    def add(self, linear: LoRALinear, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds to the rows of y [T, out] what each one's adapter makes of its x [T, in]."""


class LoRAProducts(Protocol):
    """A way to compute what adapters add."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows, one for each way in which rows are computed that is to be compiled."""

    def rows(self, slots: RowSlots) -> AdaptedRows: ...

    def static(
        self, layers: Rows[Mapping[LinearName, LoRALinear]], device: torch.device
    ) -> "StaticLoRA | None":
        """Room for the rows of recorded steps; None: these products cannot be recorded."""


@dataclass(frozen=True, slots=True)
class LoRALimits:
    """`slots` for adapters; `steps` are the most rows of a step that may be recorded."""

    slots: int
    steps: int
    element_bytes: int


@runtime_checkable
class OwnLoRA(Protocol):
    """Operators that bring such products of their own."""

    def lora_products(self, limits: LoRALimits, move: Move) -> LoRAProducts: ...


@dataclass(frozen=True, slots=True)
class LayerLoRA:
    """One decoder layer's part in a step."""

    linears: Mapping[LinearName, LoRALinear]
    rows: AdaptedRows

    def add(self, name: LinearName, x: torch.Tensor, y: torch.Tensor) -> None:
        """Changes `y`, the product of the layer's own weights and `x`, in place."""
        linear = self.linears.get(name)
        if linear is not None:
            self.rows.add(linear, x, y)


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """`tokens` are a step's T rows, `logits` those R of them that sample."""

    layers: Rows[Mapping[LinearName, LoRALinear]]
    tokens: AdaptedRows
    logits: AdaptedRows

    def of_tokens(self, index: int) -> LayerLoRA:
        """Layer `index` while it computes all rows."""
        return LayerLoRA(self.layers[index], self.tokens)

    def of_logits(self, index: int) -> LayerLoRA:
        """Layer `index` while it computes only the rows that sample."""
        return LayerLoRA(self.layers[index], self.logits)


class StaticLoRA(Protocol):
    """Where recorded steps find which rows have which adapter."""

    def fill(self, batch: LoRABatch, size: int) -> None:
        """Takes a step's rows, of which there are at most `size`."""

    def view(self, size: int) -> LoRABatch:
        """As a model sees a recorded step of so many rows."""
