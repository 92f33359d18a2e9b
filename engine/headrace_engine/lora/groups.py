"""The adapters' products by torch on any device: the rows of one adapter at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .batch import NO_ADAPTER, RowSlots
from .experts import LinearAdapters, LoRAExperts
from .linear import LoRALinear, SlotMatrices
from .shapes import LinearName


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows of the adapter in `slot`: a run of rows, or an int64 tensor of them."""

    slot: int
    rows: slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """A step's rows, grouped by adapter."""

    groups: tuple[_Group, ...]

    def add(self, linear: LinearAdapters, x: torch.Tensor, y: torch.Tensor) -> None:
        for group in self.groups:
            matrices = linear.matrices(group.slot)
            if matrices is not None:
                _add(matrices, group.rows, x, y)


def _add(
    matrices: SlotMatrices, rows: slice | torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> None:
    inner = x[rows] @ matrices.down
    for part in matrices.parts:
        if isinstance(rows, slice):
            y[rows, part.outputs].addmm_(inner[:, part.inner], part.up)
        else:
            y[:, part.outputs].index_add_(0, rows, inner[:, part.inner] @ part.up)


class GroupedProducts:
    """The adapters' products by torch, one adapter at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def sizes(self) -> tuple[int, ...]:
        return ()

    def rows(self, slots: RowSlots) -> GroupedRows:
        found = [(int(slot), np.flatnonzero(slots == slot)) for slot in np.unique(slots)]
        return GroupedRows(
            tuple(_Group(slot, self._rows(rows)) for slot, rows in found if slot != NO_ADAPTER)
        )

    def static(
        self,
        layers: Sequence[Mapping[LinearName, LoRALinear]],
        device: torch.device,
        experts: Sequence[Mapping[LinearName, LoRAExperts]] = (),
    ) -> None:
        """Returns None: these products cannot be recorded, as only the host knows the rows."""

    def _rows(self, rows: npt.NDArray[np.int64]) -> slice | torch.Tensor:
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return slice(first, last + 1)
        return torch.from_numpy(rows).to(self._device)
