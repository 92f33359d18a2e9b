"""LoRA in a runner's steps: loads the adapters of a step and assigns them to its rows.

The scheduler never schedules more adapters at once than there are slots.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..core.config import EngineConfig
from ..core.step_plan import ScheduledSequence, SchedulerOutput
from ..device.transfer import Transfer
from ..kv_cache.memory_budget import available_memory
from ..lora.adapter import AdapterWeights
from ..lora.adapters import Adapters
from ..lora.batch import NO_ADAPTER, LoRABatch, RowOwners, RowSlots, StaticLoRA
from ..lora.device import DeviceLoRA
from ..lora.object_storage import fetched, is_in_object_storage
from ..models.placed_model import PlacedModel
from .input_batch import StepBatch

# The adapter of rows in profile and warm-up runs: the one in the first slot.
ANY = ""


class LoRARuntime:
    """The adapter slots of one model and the adapters that may use them.

    Other ranks get their part of an adapter from this one, and read no file.
    """

    def __init__(self, config: EngineConfig, placed: PlacedModel, transfer: Transfer) -> None:
        assert placed.lora_shapes is not None, "a model without them was refused"
        kept = config.max_cpu_loras or config.max_loras
        self.adapters = Adapters(placed.lora_shapes, config.max_lora_rank, placed.dtype, kept)
        for name, place in config.lora_modules.items():
            with _folder(place) as folder:
                self.adapters.add(name, folder)
        experts = config.lora_experts or self.adapters.change_experts
        self._peers = placed.peers
        if not experts:
            self.adapters.refuse_experts()
        if self._peers is not None:
            self._peers.allocate_adapters(experts)
        self._device = DeviceLoRA(
            config, placed.lora_shapes, placed.ops, placed.dtype, transfer, experts=experts
        )

    @classmethod
    def of(
        cls, config: EngineConfig, placed: PlacedModel, transfer: Transfer
    ) -> "LoRARuntime | None":
        """The runtime; None if LoRA is off. Raises ConfigError or CheckpointError."""
        return cls(config, placed, transfer) if config.enable_lora else None

    @property
    def static(self) -> StaticLoRA | None:
        """The buffers in which recorded CUDA graphs find the adapters of their rows."""
        return self._device.static

    def extend(self, scheduler_output: SchedulerOutput, batch: StepBatch) -> StepBatch:
        """Loads the step's adapters and returns its batch with the adapters of its rows."""
        lora = self._batch(scheduler_output)
        return batch if lora is None else replace(batch, forward=replace(batch.forward, lora=lora))

    def warm_up(self) -> None:
        self._device.warm_up()

    def remove(self, name: str) -> None:
        """Forgets an adapter that no request uses. Its name must not return with other weights."""
        self.adapters.remove(name)
        self._device.slots.release(name)

    def _batch(self, scheduler_output: SchedulerOutput) -> LoRABatch | None:
        wanted = dict.fromkeys(item.sequence.request.lora for item in scheduler_output.scheduled)
        if not any(name is not None for name in wanted):
            return None
        slot_of: dict[str | None, int] = {None: NO_ADAPTER, ANY: 0}
        slot_of.update(self._place([name for name in wanted if name]).items())
        owners = [slot_of[item.sequence.request.lora] for item in scheduler_output.scheduled]
        tokens = _row_slots(owners, _token_counts(scheduler_output.scheduled))
        logits = _row_slots(*_logit_counts(owners, scheduler_output.scheduled))
        return self._device.batch(RowOwners(tokens, logits))

    def _place(self, names: Sequence[str]) -> dict[str, int]:
        """Loads adapters that one step needs into slots, and returns the slots.

        Raises CheckpointError if one cannot be read; then nothing has changed.
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


def _row_slots(owners: Sequence[int], counts: Sequence[int]) -> RowSlots:
    """The slot of each row: `counts[i]` rows belong to `owners[i]`."""
    return np.repeat(np.array(owners, dtype=np.int64), np.array(counts, dtype=np.int64))


def _token_counts(scheduled: Sequence[ScheduledSequence]) -> list[int]:
    return [item.length + len(item.drafts) for item in scheduled]


def _logit_counts(
    owners: Sequence[int], scheduled: Sequence[ScheduledSequence]
) -> tuple[list[int], list[int]]:
    """Owners and counts of logits rows, in the order of input_batch: sampled, then scored."""
    sampling = [1 + len(item.drafts) if item.samples else 0 for item in scheduled]
    return [*owners, *owners], [*sampling, *(item.scores for item in scheduled)]


def _folder(place: str) -> AbstractContextManager[Path]:
    """The folder of an adapter of the settings. Raises CheckpointError if it cannot be fetched."""
    if is_in_object_storage(place):
        return fetched(place, available_memory())
    return nullcontext(Path(place))
