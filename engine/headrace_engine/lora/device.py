"""Adapters on one device: their memory, and the rows of a step that use it.

Every rank has one DeviceLoRA. It knows which slot a row needs, but not which adapter is in it.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..core.config import EngineConfig
from ..device.transfer import Transfer
from .batch import LoRABatch, LoRALimits, LoRAOps, LoRAProducts, RowOwners, StaticLoRA
from .groups import GroupedProducts
from .shapes import LayerShapes, without_experts
from .slots import LoRASlots


class DeviceLoRA:
    """The adapters' memory and their matrix products, by the operators' own kernels or by torch.

    Without `experts` there is no memory for changes to the experts of mixtures.
    """

    def __init__(
        self,
        config: EngineConfig,
        shapes: Sequence[LayerShapes],
        ops: object,
        dtype: torch.dtype,
        transfer: Transfer,
        *,
        experts: bool,
    ) -> None:
        device = transfer.device
        self.shapes = tuple(shapes) if experts else without_experts(shapes)
        self.slots = LoRASlots(self.shapes, config.max_loras, config.max_lora_rank, dtype, device)
        self._products: LoRAProducts = GroupedProducts(device)
        if isinstance(ops, LoRAOps):
            limits = LoRALimits(config.max_loras, config.max_num_seqs, dtype.itemsize)
            self._products = ops.lora_products(limits, transfer)
        self.static: StaticLoRA | None = self._products.static(
            self.slots.layers, device, self.slots.experts
        )
        self._last: tuple[tuple[bytes, bytes], LoRABatch] | None = None

    def batch(self, owners: RowOwners) -> LoRABatch:
        """Makes a step's LoRABatch; decodes often have the rows of the step before, which are
        reused."""
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
        """Compiles what steps with adapters need, for few rows and for many; changes no memory
        except the results of these products."""
        for rows in self._products.sizes:
            adapted = self._products.rows(np.zeros(rows, dtype=np.int64))
            for layer in self.slots.layers:
                for linear in layer.values():
                    shape, made = linear.shape, linear.up.new_zeros
                    adapted.add(linear, made(rows, shape.inputs), made(rows, shape.outputs))
