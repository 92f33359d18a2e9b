"""Adapters on one device: their memory, and the rows of steps that use it. Rank 0 of a model and
all others have one each, and know here which slot a row needs but not whose adapter is in it.
"""

import numpy as np

from ..config import EngineConfig
from ..placement import PlacedModel
from ..transfer import Transfer
from .batch import LoRABatch, LoRALimits, LoRAProducts, OwnLoRA, RowOwners, StaticLoRA
from .groups import GroupedProducts
from .shapes import without_experts
from .slots import LoRASlots


class DeviceLoRA:
    """The model's operators may bring products of their own; else they are torch's. Without
    `experts` there is no room for what changes those of mixtures."""

    def __init__(
        self, config: EngineConfig, placed: PlacedModel, experts: bool, transfer: Transfer
    ) -> None:
        assert placed.lora_shapes is not None, "a model without them was refused"
        every, ops = placed.lora_shapes, placed.ops
        dtype, device = placed.dtype, placed.device
        self.shapes = every if experts else without_experts(every)
        self.slots = LoRASlots(self.shapes, config.max_loras, config.max_lora_rank, dtype, device)
        self._products: LoRAProducts = GroupedProducts(device)
        if isinstance(ops, OwnLoRA):
            limits = LoRALimits(config.max_loras, config.max_num_seqs, dtype.itemsize)
            self._products = ops.lora_products(limits, transfer)
        self.static: StaticLoRA | None = self._products.static(
            self.slots.layers, device, self.slots.experts
        )
        self._last: tuple[tuple[bytes, bytes], LoRABatch] | None = None

    def batch(self, owners: RowOwners) -> LoRABatch:
        """Decodes often have the rows of the step before, which are on the device already."""
        key = owners.tokens.tobytes(), owners.logits.tobytes()
        if self._last is None or self._last[0] != key:
            rows = self._products.rows(owners.tokens)
            sampling = rows if key[0] == key[1] else self._products.rows(owners.logits)
            self._last = (
                key,
                LoRABatch(self.slots.layers, rows, sampling, owners, self.slots.experts),
            )
        return self._last[1]

    def warm_up(self) -> None:
        """Compiles what steps with adapters need, for few rows and for many; without effect on any
        memory but the results of these products."""
        for rows in self._products.sizes:
            adapted = self._products.rows(np.zeros(rows, dtype=np.int64))
            for layer in self.slots.layers:
                for linear in layer.values():
                    shape, made = linear.shape, linear.up.new_zeros
                    adapted.add(linear, made(rows, shape.inputs), made(rows, shape.outputs))
