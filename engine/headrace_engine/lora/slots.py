"""The adapters on the device: as many slots as one batch may need, each with memory for any
adapter.

The memory is taken once, before the KV cache is sized, so adapters that are loaded later take none.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from .adapter import AdapterWeights
from .experts import LoRAExperts
from .linear import LoRALinear
from .packing import LayerWeights
from .shapes import LayerShapes, LinearName


class LoRASlots:
    """The adapter in each slot; the least recently used one is evicted."""

    def __init__(
        self,
        shapes: Sequence[LayerShapes],
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers: tuple[Mapping[LinearName, LoRALinear], ...] = tuple(
            {
                name: LoRALinear(shape, slots, max_rank, dtype, device)
                for name, shape in layer.items()
                if not shape.experts
            }
            for layer in shapes
        )
        self.experts: tuple[Mapping[LinearName, LoRAExperts], ...] = tuple(
            {
                name: LoRAExperts(shape, slots, shape.matrices * max_rank, dtype, device)
                for name, shape in layer.items()
                if shape.experts
            }
            for layer in shapes
        )
        self._free = list(range(slots))
        # Adapters, the least recently used first.
        self._slot_of: dict[str, int] = {}

    @property
    def names(self) -> Collection[str]:
        """The adapters that are on the device."""
        return self._slot_of.keys()

    def missing(self, wanted: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in wanted if name not in self._slot_of)

    def use(self, wanted: Collection[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Returns the slots of adapters for one step, and the adapters whose weights must be
        `put`."""
        missing = self.missing(wanted)
        for name in wanted:
            if name in self._slot_of:
                self._slot_of[name] = self._slot_of.pop(name)
        for name in missing:
            self._slot_of[name] = self._free.pop() if self._free else self._evict(wanted)
        return {name: self._slot_of[name] for name in wanted}, missing

    def release(self, name: str) -> None:
        """Frees the slot of an adapter that no running sequence uses."""
        slot = self._slot_of.pop(name, None)
        if slot is not None:
            self._free.append(slot)

    def put(self, slot: int, weights: AdapterWeights) -> None:
        for index, modules in enumerate(weights):
            self.put_layer(slot, index, modules)

    def put_layer(self, slot: int, index: int, modules: LayerWeights) -> None:
        for name, linear in self.layers[index].items():
            linear.put(slot, modules.get(name, {}))
        for name, experts in self.experts[index].items():
            experts.put(slot, next(iter(modules.get(name, {}).values()), None))

    def _evict(self, wanted: Collection[str]) -> int:
        victim = next((name for name in self._slot_of if name not in wanted), None)
        assert victim is not None, "more adapters were scheduled than there are slots"
        return self._slot_of.pop(victim)
