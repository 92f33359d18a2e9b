"""Adapters in a runner's steps: brings a plan's onto the device, tells rows apart.

Decides nothing about requests: the scheduler never plans more adapters than there are slots.
"""

from collections.abc import Sequence as Rows
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..batch import StepBatch
from ..config import EngineConfig
from ..errors import ConfigError
from ..model.base import CausalModel
from ..plan import ScheduledSequence, StepPlan
from .adapters import Adapters
from .batch import LoRABatch, LoRARows
from .shapes import AdaptableModel
from .slots import LoRASlots

NO_ADAPTER = -1


class LoRARuntime:
    """The slots of one model, and the adapters that may come into them."""

    def __init__(
        self, config: EngineConfig, model: AdaptableModel, dtype: torch.dtype, device: torch.device
    ) -> None:
        shapes, rank, slots = model.lora_shapes, config.max_lora_rank, config.max_loras
        self._device = device
        self.adapters = Adapters(shapes, rank, dtype, config.max_cpu_loras or slots)
        for name, folder in config.lora_modules.items():
            self.adapters.add(name, Path(folder))
        self.slots = LoRASlots(shapes, slots, rank, dtype, device)

    @classmethod
    def of(
        cls, config: EngineConfig, model: CausalModel, dtype: torch.dtype, device: torch.device
    ) -> "LoRARuntime | None":
        """None where the configuration asks for none. Raises ConfigError or CheckpointError."""
        if not config.enable_lora:
            return None
        if not isinstance(model, AdaptableModel):
            raise ConfigError(
                "enable_lora needs the native implementation of a model that makes text: see "
                "model_implementation and docs/lora.md"
            )
        return cls(config, model, dtype, device)

    def extend(self, plan: StepPlan, batch: StepBatch) -> StepBatch:
        """A step's batch with the adapters of its rows, which are on the device then."""
        lora = self._batch(plan)
        return batch if lora is None else replace(batch, forward=replace(batch.forward, lora=lora))

    def _batch(self, plan: StepPlan) -> LoRABatch | None:
        wanted = {item.sequence.request.lora: None for item in plan.scheduled}
        wanted.pop(None, None)
        names = [name for name in wanted if name is not None]
        if not names:
            return None
        slot_of, missing = self.slots.use(names)
        for name in missing:
            self.slots.put(slot_of[name], self.adapters.load(name))
        owners = [
            NO_ADAPTER if name is None else slot_of[name]
            for name in [item.sequence.request.lora for item in plan.scheduled]
        ]
        return LoRABatch(
            self.slots.layers,
            self._groups(owners, _token_counts(plan.scheduled)),
            self._groups(*_logit_counts(owners, plan.scheduled)),
        )

    def _groups(self, owners: Rows[int], counts: Rows[int]) -> tuple[LoRARows, ...]:
        """The rows of each slot, where the i-th run of `counts[i]` rows is of `owners[i]`."""
        slots = np.repeat(np.array(owners, dtype=np.int64), np.array(counts, dtype=np.int64))
        found = [(slot, np.flatnonzero(slots == slot)) for slot in sorted(set(owners))]
        return tuple(
            LoRARows(slot, self._rows(rows))
            for slot, rows in found
            if slot != NO_ADAPTER and len(rows)
        )

    def _rows(self, rows: npt.NDArray[np.int64]) -> slice | torch.Tensor:
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return slice(first, last + 1)
        return torch.from_numpy(rows).to(self._device)


def _token_counts(scheduled: Rows[ScheduledSequence]) -> list[int]:
    return [item.length + len(item.drafts) for item in scheduled]


def _logit_counts(
    owners: Rows[int], scheduled: Rows[ScheduledSequence]
) -> tuple[list[int], list[int]]:
    """As batch.build orders them: the rows that sample, then those that are scored."""
    sampling = [1 + len(item.drafts) if item.samples else 0 for item in scheduled]
    return [*owners, *owners], [*sampling, *(item.scores for item in scheduled)]
