"""The adapters of one step, and which rows of the batch each of them changes.

A row's result is W x + scale * B (A x). The model's own product computes the first term for all
rows; this module adds the second to rows that have an adapter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from ..device.transfer import Array
from .experts import LoRAExperts
from .linear import LoRALinear
from .shapes import LinearName

NO_ADAPTER = -1
# The layers of a gated MLP.
BlockLinear = Literal["gate_up", "down"]

_NO_EXPERTS: Mapping[LinearName, LoRAExperts] = MappingProxyType({})

# Copies arrays of the host to the device: transfer.Transfer.
Move = Callable[[Sequence[Array]], list[torch.Tensor]]
# The slot of each row's adapter, or NO_ADAPTER.
RowSlots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowOwners:
    """Owners of a step's T rows and of the R that sample, as the host knows them."""

    tokens: RowSlots
    logits: RowSlots


class AdaptedRows(Protocol):
    """The adapters of rows, in the form that a device's products need."""

    def add(self, linear: LoRALinear, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds to the rows of y [T, out] their adapters' products with x [T, in]."""


class LoRAProducts(Protocol):
    """A way to compute the adapters' products."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows to compile for: one for each way of computing rows."""

    def rows(self, slots: RowSlots) -> AdaptedRows: ...

    def static(
        self,
        layers: Sequence[Mapping[LinearName, LoRALinear]],
        device: torch.device,
        experts: Sequence[Mapping[LinearName, LoRAExperts]] = (),
    ) -> "StaticLoRA | None":
        """Buffers for the rows of recorded steps; None if these products cannot be recorded."""


@dataclass(frozen=True, slots=True)
class LoRALimits:
    """`slots` for adapters; `steps` is the largest number of rows in a recorded step."""

    slots: int
    steps: int
    element_bytes: int


@runtime_checkable
class LoRAOps(Protocol):
    """Operators that have their own adapter products."""

    def lora_products(self, limits: LoRALimits, move: Move) -> LoRAProducts: ...


class BlockLoRA(Protocol):
    """The adapters' changes to a gated MLP."""

    def add(self, name: BlockLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        """Like LayerLoRA.add."""


@dataclass(frozen=True, slots=True)
class LayerLoRA:
    """One decoder layer's adapters in a step; `owners` as in LoRABatch."""

    linears: Mapping[LinearName, LoRALinear]
    rows: AdaptedRows
    experts: Mapping[LinearName, LoRAExperts] = field(default_factory=lambda: _NO_EXPERTS)
    owners: RowSlots | None = None

    @property
    def shared(self) -> BlockLoRA:
        """The adapters of the expert that computes every token."""
        return _SharedLoRA(self)

    def add(self, name: LinearName, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds to `y`, the product of the layer's own weights and `x`, in place."""
        linear = self.linears.get(name)
        if linear is not None:
            self.rows.add(linear, x, y)


@dataclass(frozen=True, slots=True)
class _SharedLoRA:
    layer: LayerLoRA

    def add(self, name: BlockLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        self.layer.add("shared_gate_up" if name == "gate_up" else "shared_down", x, y)


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """A step's adapters. `tokens` are its T rows, `logits` the R rows that sample. `owners` None:
    only the device knows them."""

    layers: Sequence[Mapping[LinearName, LoRALinear]]
    tokens: AdaptedRows
    logits: AdaptedRows
    owners: RowOwners | None = None
    experts: Sequence[Mapping[LinearName, LoRAExperts]] = ()

    def of_tokens(self, index: int) -> LayerLoRA:
        """Layer `index` when it computes all rows."""
        owners = None if self.owners is None else self.owners.tokens
        return LayerLoRA(self.layers[index], self.tokens, self._experts(index), owners)

    def of_logits(self, index: int) -> LayerLoRA:
        """Layer `index` when it computes only the rows that sample."""
        owners = None if self.owners is None else self.owners.logits
        return LayerLoRA(self.layers[index], self.logits, self._experts(index), owners)

    def _experts(self, index: int) -> Mapping[LinearName, LoRAExperts]:
        return self.experts[index] if self.experts else _NO_EXPERTS


class StaticLoRA(Protocol):
    """The buffers from which recorded steps read the adapters of rows."""

    def fill(self, batch: LoRABatch, size: int) -> None:
        """Copies a step's rows, at most `size`."""

    def view(self, size: int) -> LoRABatch:
        """The input of a recorded step of `size` rows."""
