"""Adapters in a runner's steps: brings a plan's onto the device, tells rows apart.

Decides nothing about requests: the scheduler never plans more adapters than there are slots.
"""

from collections.abc import Sequence as Rows
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ..batch import StepBatch
from ..config import EngineConfig
from ..errors import ConfigError
from ..placement import PlacedModel
from ..plan import ScheduledSequence, StepPlan
from ..transfer import Transfer
from .adapters import Adapters
from .batch import NO_ADAPTER, LoRABatch, LoRALimits, LoRAProducts, OwnLoRA, RowSlots, StaticLoRA
from .groups import GroupedProducts
from .shapes import AdaptableModel
from .slots import LoRASlots

# The adapter of rows in runs that measure or warm up: whatever lies in the first slot.
ANY = ""


class LoRARuntime:
    """The slots of one model, and the adapters that may come into them."""

    def __init__(
        self,
        config: EngineConfig,
        model: AdaptableModel,
        dtype: torch.dtype,
        device: torch.device,
        products: LoRAProducts,
    ) -> None:
        shapes, rank, slots = model.lora_shapes, config.max_lora_rank, config.max_loras
        self._products = products
        self._last: tuple[tuple[bytes, bytes], LoRABatch] | None = None
        self.adapters = Adapters(shapes, rank, dtype, config.max_cpu_loras or slots)
        for name, folder in config.lora_modules.items():
            self.adapters.add(name, Path(folder))
        self.slots = LoRASlots(shapes, slots, rank, dtype, device)
        self.static: StaticLoRA | None = products.static(self.slots.layers, device)

    @classmethod
    def of(
        cls, config: EngineConfig, placed: PlacedModel, transfer: Transfer
    ) -> "LoRARuntime | None":
        """None where the configuration asks for none. Raises ConfigError or CheckpointError."""
        if not config.enable_lora:
            return None
        if not isinstance(placed.model, AdaptableModel):
            raise ConfigError(
                "enable_lora needs the native implementation of a model that makes text: see "
                "model_implementation and docs/lora.md"
            )
        products = _products(config, placed, transfer)
        return cls(config, placed.model, placed.dtype, placed.device, products)

    def extend(self, plan: StepPlan, batch: StepBatch) -> StepBatch:
        """A step's batch with the adapters of its rows, which are on the device then."""
        lora = self._batch(plan)
        return batch if lora is None else replace(batch, forward=replace(batch.forward, lora=lora))

    def warm_up(self) -> None:
        """Compiles what steps with adapters need, for few rows and for many; without effect on any
        memory but the results of these products."""
        for rows in self._products.sizes:
            adapted = self._products.rows(np.zeros(rows, dtype=np.int64))
            for layer in self.slots.layers:
                for linear in layer.values():
                    shape, made = linear.shape, linear.up.new_zeros
                    adapted.add(linear, made(rows, shape.inputs), made(rows, shape.outputs))

    def _batch(self, plan: StepPlan) -> LoRABatch | None:
        wanted = dict.fromkeys(item.sequence.request.lora for item in plan.scheduled)
        if not any(name is not None for name in wanted):
            return None
        slot_of: dict[str | None, int] = {None: NO_ADAPTER, ANY: 0}
        slot_of.update(self._place([name for name in wanted if name]).items())
        owners = [slot_of[item.sequence.request.lora] for item in plan.scheduled]
        tokens = _row_slots(owners, _token_counts(plan.scheduled))
        return self._of_rows(tokens, _row_slots(*_logit_counts(owners, plan.scheduled)))

    def _of_rows(self, tokens: RowSlots, logits: RowSlots) -> LoRABatch:
        """Decodes often have the rows of the step before, which are on the device already."""
        key = tokens.tobytes(), logits.tobytes()
        if self._last is None or self._last[0] != key:
            rows = self._products.rows(tokens)
            sampling = rows if key[0] == key[1] else self._products.rows(logits)
            self._last = key, LoRABatch(self.slots.layers, rows, sampling)
        return self._last[1]

    def _place(self, names: Rows[str]) -> dict[str, int]:
        """The slots of adapters that are needed together; their weights are in them."""
        slot_of, missing = self.slots.use(names)
        for name in missing:
            self.slots.put(slot_of[name], self.adapters.load(name))
        return slot_of


def _products(config: EngineConfig, placed: PlacedModel, transfer: Transfer) -> LoRAProducts:
    if not isinstance(placed.ops, OwnLoRA):
        return GroupedProducts(placed.device)
    limits = LoRALimits(config.max_loras, config.max_num_seqs, placed.dtype.itemsize)
    return placed.ops.lora_products(limits, transfer)


def _row_slots(owners: Rows[int], counts: Rows[int]) -> RowSlots:
    """Of rows, of which the i-th run of `counts[i]` is of `owners[i]`."""
    return np.repeat(np.array(owners, dtype=np.int64), np.array(counts, dtype=np.int64))


def _token_counts(scheduled: Rows[ScheduledSequence]) -> list[int]:
    return [item.length + len(item.drafts) for item in scheduled]


def _logit_counts(
    owners: Rows[int], scheduled: Rows[ScheduledSequence]
) -> tuple[list[int], list[int]]:
    """As batch.build orders them: the rows that sample, then those that are scored."""
    sampling = [1 + len(item.drafts) if item.samples else 0 for item in scheduled]
    return [*owners, *owners], [*sampling, *(item.scores for item in scheduled)]
