"""Adapters in a runner's steps: brings a plan's onto the device, tells rows apart.

Decides nothing about requests: the scheduler never plans more adapters than there are slots.
"""

from collections.abc import Sequence as Rows
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..batch import StepBatch
from ..config import EngineConfig
from ..placement import PlacedModel
from ..plan import ScheduledSequence, StepPlan
from ..transfer import Transfer
from .adapter import AdapterWeights
from .adapters import Adapters
from .batch import NO_ADAPTER, LoRABatch, RowOwners, RowSlots, StaticLoRA
from .device import DeviceLoRA

# The adapter of rows in runs that measure or warm up: whatever lies in the first slot.
ANY = ""


class LoRARuntime:
    """The slots of one model, and the adapters that may come into them. Where other ranks share the
    model, they get what they need of an adapter with it, and read no file."""

    def __init__(self, config: EngineConfig, placed: PlacedModel, transfer: Transfer) -> None:
        assert placed.lora_shapes is not None, "a model without them was refused"
        kept = config.max_cpu_loras or config.max_loras
        self.adapters = Adapters(placed.lora_shapes, config.max_lora_rank, placed.dtype, kept)
        for name, folder in config.lora_modules.items():
            self.adapters.add(name, Path(folder))
        experts, self._peers = self.adapters.change_experts, placed.peers
        if not experts:
            self.adapters.refuse_experts()
        if self._peers is not None:
            self._peers.make_room(experts)
        self._device = DeviceLoRA(config, placed, experts, transfer)

    @classmethod
    def of(
        cls, config: EngineConfig, placed: PlacedModel, transfer: Transfer
    ) -> "LoRARuntime | None":
        """None where the configuration asks for none. Raises ConfigError or CheckpointError."""
        return cls(config, placed, transfer) if config.enable_lora else None

    @property
    def static(self) -> StaticLoRA | None:
        """Where recorded steps find the adapters of their rows."""
        return self._device.static

    def extend(self, plan: StepPlan, batch: StepBatch) -> StepBatch:
        """A step's batch with the adapters of its rows, which are on the device then."""
        lora = self._batch(plan)
        return batch if lora is None else replace(batch, forward=replace(batch.forward, lora=lora))

    def warm_up(self) -> None:
        self._device.warm_up()

    def _batch(self, plan: StepPlan) -> LoRABatch | None:
        wanted = dict.fromkeys(item.sequence.request.lora for item in plan.scheduled)
        if not any(name is not None for name in wanted):
            return None
        slot_of: dict[str | None, int] = {None: NO_ADAPTER, ANY: 0}
        slot_of.update(self._place([name for name in wanted if name]).items())
        owners = [slot_of[item.sequence.request.lora] for item in plan.scheduled]
        tokens = _row_slots(owners, _token_counts(plan.scheduled))
        logits = _row_slots(*_logit_counts(owners, plan.scheduled))
        return self._device.batch(RowOwners(tokens, logits))

    def _place(self, names: Rows[str]) -> dict[str, int]:
        """The slots of adapters that are needed together; their weights are in them.

        Raises CheckpointError where one cannot be read, and leaves all as it was.
        """
        slots = self._device.slots
        loaded = {name: self.adapters.load(name) for name in slots.missing(names)}
        slot_of, _ = slots.use(names)
        for name, weights in loaded.items():
            self._put(slot_of[name], weights)
        return slot_of

    def _put(self, slot: int, weights: AdapterWeights) -> None:
        if self._peers is not None:
            self._peers.put_adapter(slot, self._device.shapes, weights)
        self._device.slots.put(slot, weights)


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
