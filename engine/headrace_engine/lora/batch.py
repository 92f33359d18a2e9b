"""The adapters of one step: which rows of the batch each of them changes.

A row's result is W x + scale * B (A x): the first is the model's own product for all rows, the rest
is added here to the rows that have an adapter.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from ..transfer import Array
from .experts import LoRAExperts
from .linear import LoRALinear
from .shapes import LinearName

NO_ADAPTER = -1
# The layers of a gated MLP.
BlockLinear = Literal["gate_up", "down"]

_NO_EXPERTS: Mapping[LinearName, LoRAExperts] = MappingProxyType({})

# Arrays of the host as tensors of the device: transfer.Transfer.
Move = Callable[[Rows[Array]], list[torch.Tensor]]
# The slot of each row's adapter, or NO_ADAPTER.
RowSlots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowOwners:
    """Of a step's T rows and of the R that sample, as the host knows them."""

    tokens: RowSlots
    logits: RowSlots


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
        self,
        layers: Rows[Mapping[LinearName, LoRALinear]],
        device: torch.device,
        experts: Rows[Mapping[LinearName, LoRAExperts]] = (),
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


class BlockLoRA(Protocol):
    """What adapters change in a gated MLP."""

    def add(self, name: BlockLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        """As LayerLoRA.add."""


@dataclass(frozen=True, slots=True)
class LayerLoRA:
    """One decoder layer's part in a step; `owners` as in LoRABatch."""

    linears: Mapping[LinearName, LoRALinear]
    rows: AdaptedRows
    experts: Mapping[LinearName, LoRAExperts] = field(default_factory=lambda: _NO_EXPERTS)
    owners: RowSlots | None = None

    @property
    def shared(self) -> BlockLoRA:
        """Of the expert that computes every token."""
        return _SharedLoRA(self)

    def add(self, name: LinearName, x: torch.Tensor, y: torch.Tensor) -> None:
        """Changes `y`, the product of the layer's own weights and `x`, in place."""
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
    """`tokens` are a step's T rows, `logits` those R of them that sample. `owners` None: only the
    device knows whose they are."""

    layers: Rows[Mapping[LinearName, LoRALinear]]
    tokens: AdaptedRows
    logits: AdaptedRows
    owners: RowOwners | None = None
    experts: Rows[Mapping[LinearName, LoRAExperts]] = ()

    def of_tokens(self, index: int) -> LayerLoRA:
        """Layer `index` while it computes all rows."""
        owners = None if self.owners is None else self.owners.tokens
        return LayerLoRA(self.layers[index], self.tokens, self._experts(index), owners)

    def of_logits(self, index: int) -> LayerLoRA:
        """Layer `index` while it computes only the rows that sample."""
        owners = None if self.owners is None else self.owners.logits
        return LayerLoRA(self.layers[index], self.logits, self._experts(index), owners)

    def _experts(self, index: int) -> Mapping[LinearName, LoRAExperts]:
        return self.experts[index] if self.experts else _NO_EXPERTS


class StaticLoRA(Protocol):
    """Where recorded steps find which rows have which adapter."""

    def fill(self, batch: LoRABatch, size: int) -> None:
        """Takes a step's rows, of which there are at most `size`."""

    def view(self, size: int) -> LoRABatch:
        """As a model sees a recorded step of so many rows."""
