"""The adapters on the device: as many slots as may be in one batch, each with room for any adapter.

The memory is taken once, before the KV cache is sized, so that an adapter that is loaded later
takes none that is promised to something else.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from .adapter import AdapterWeights, Factors
from .batch import LoRARows
from .shapes import LayerShapes, LinearName, LinearShape


@dataclass(frozen=True, slots=True)
class _Part:
    """One module: its columns of A x, its columns of the layer's outputs, and B transposed."""

    inner: slice
    outputs: slice
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Placed:
    """A of all modules of a layer below each other, transposed [in, ranks], and the modules."""

    down: torch.Tensor
    parts: tuple[_Part, ...]


class LoRALinear:
    """What the adapters in the slots add to one linear layer."""

    def __init__(
        self,
        shape: LinearShape,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = shape
        ranks = len(shape.parts) * max_rank
        self._down = torch.zeros(slots, ranks, shape.inputs, dtype=dtype, device=device)
        # Modules have columns of their own, so that all of a layer fit side by side.
        self._up = torch.zeros(slots, max_rank, shape.outputs, dtype=dtype, device=device)
        self._placed: list[_Placed | None] = [None] * slots

    def put(self, slot: int, modules: Mapping[str, Factors]) -> None:
        """Writes an adapter's matrices into a slot, over those that were there."""
        parts: list[_Part] = []
        start = 0
        for name, columns in self._shape.parts.items():
            if name not in modules:
                continue
            factors = modules[name]
            rank = factors.down.shape[0]
            outputs = slice(columns.start, columns.start + columns.width)
            self._down[slot, start : start + rank].copy_(factors.down)
            up = self._up[slot, :rank, outputs].copy_(factors.up)
            parts.append(_Part(slice(start, start + rank), outputs, up))
            start += rank
        down = self._down[slot, :start].T
        self._placed[slot] = _Placed(down, tuple(parts)) if parts else None

    def add(self, groups: Rows[LoRARows], x: torch.Tensor, y: torch.Tensor) -> None:
        for group in groups:
            placed = self._placed[group.slot]
            if placed is not None:
                _add(placed, group.rows, x, y)


def _add(placed: _Placed, rows: slice | torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    inner = x[rows] @ placed.down
    for part in placed.parts:
        if isinstance(rows, slice):
            y[rows, part.outputs].addmm_(inner[:, part.inner], part.up)
        else:
            y[:, part.outputs].index_add_(0, rows, inner[:, part.inner] @ part.up)


class LoRASlots:
    """Which adapter lies where; the one that was used longest ago gives way."""

    def __init__(
        self,
        shapes: Rows[LayerShapes],
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers: tuple[Mapping[LinearName, LoRALinear], ...] = tuple(
            {
                name: LoRALinear(shape, slots, max_rank, dtype, device)
                for name, shape in layer.items()
            }
            for layer in shapes
        )
        self._free = list(range(slots))
        # Adapters by the time of their last use, the longest ago first.
        self._slot_of: dict[str, int] = {}

    @property
    def names(self) -> Collection[str]:
        """The adapters that are on the device."""
        return self._slot_of.keys()

    def use(self, wanted: Collection[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Slots for adapters that are needed together, and those whose weights must be `put`."""
        missing = tuple(name for name in wanted if name not in self._slot_of)
        for name in wanted:
            if name in self._slot_of:
                self._slot_of[name] = self._slot_of.pop(name)
        for name in missing:
            self._slot_of[name] = self._free.pop() if self._free else self._evict(wanted)
        return {name: self._slot_of[name] for name in wanted}, missing

    def put(self, slot: int, weights: AdapterWeights) -> None:
        for layer, modules in zip(self.layers, weights, strict=True):
            for name, linear in layer.items():
                linear.put(slot, modules.get(name, {}))

    def _evict(self, wanted: Collection[str]) -> int:
        victim = next((name for name in self._slot_of if name not in wanted), None)
        assert victim is not None, "more adapters were scheduled than there are slots"
        return self._slot_of.pop(victim)
