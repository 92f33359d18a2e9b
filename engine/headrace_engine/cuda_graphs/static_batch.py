"""The inputs of captured decode steps at fixed addresses, and how a step's inputs are copied
there."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.attention_backend import AttentionMetadata
from ..core.kv_cache_groups import ONE_GROUP, KVLayout
from ..lora.batch import StaticLoRA
from ..models.base import ForwardBatch, of_layers

# The number of block ids that one program copies at a time.
TABLE_BLOCK = 128


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of sequences with one token each: `seq_lens` int32 [S], `tables` int32 [S, B], the
    others int64 [S]."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    tables: torch.Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, layer: int = 0) -> "DecodeInputs":
        """The inputs of one layer."""
        metadata = batch.metadata_of(layer)
        return cls(
            batch.input_ids,
            batch.positions,
            metadata.slots,
            metadata.seq_lens,
            metadata.block_tables,
        )


# (from, to, size with padding): copies inputs and pads them.
Stage = Callable[[DecodeInputs, DecodeInputs, int], None]


def stage_by_copies(source: DecodeInputs, target: DecodeInputs, size: int) -> None:
    """Copies on any device, in a few launches."""
    count, width = source.tables.shape
    target.input_ids[:count].copy_(source.input_ids)
    target.positions[:count].copy_(source.positions)
    target.slots[:count].copy_(source.slots)
    target.seq_lens[:count].copy_(source.seq_lens)
    target.tables[:count, :width].copy_(source.tables)
    if count < size:
        target.slots[count:size].fill_(-1)
        target.seq_lens[count:size].zero_()


def stage_by_kernel(source: DecodeInputs, target: DecodeInputs, size: int) -> None:
    """Copies on CUDA devices, in one launch."""
    from ..kernels.triton.staging import stage_kernel

    count, width = source.tables.shape
    stage_kernel[(size,)](
        target.input_ids, target.positions, target.slots, target.seq_lens, target.tables,
        source.input_ids, source.positions, source.slots, source.seq_lens, source.tables,
        count, width, source.tables.stride(0), target.tables.stride(0),
        BLOCK=TABLE_BLOCK, num_warps=1,
    )  # fmt: skip


class StaticBatch:
    """Buffers of fixed addresses for a decode step. Padding sequences have no keys, and slots below
    0, which are not written.

    `lora` has the adapters of rows; None if recordings have no adapters. `layout` says which layers
    share block tables and slots.
    """

    def __init__(
        self,
        size: int,
        blocks: int,
        device: torch.device,
        lora: StaticLoRA | None = None,
        layout: KVLayout = ONE_GROUP,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        ids, positions, lens = zeros(size), zeros(size), zeros(size, dtype=torch.int32)
        self._layout, self._layers = layout, layout.layer_of_each_group
        # One entry for each group of layers.
        self._inputs = [
            DecodeInputs(
                ids,
                positions,
                zeros(size).fill_(-1),
                lens,
                zeros(size, blocks, dtype=torch.int32),
            )
            for _ in range(layout.groups.count)
        ]
        self._starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(size, device=device)
        self._stage: Stage = stage_by_kernel if device.type == "cuda" else stage_by_copies
        self._lora = lora

    @property
    def kinds(self) -> tuple[bool, ...]:
        """The kinds of steps to capture: with and, if adapters are on, without adapters."""
        return (False,) if self._lora is None else (True, False)

    @property
    def num_bytes(self) -> int:
        first = self._inputs[0]
        shared = (first.input_ids, first.positions, first.seq_lens, self._starts, self._rows)
        own = [part for inputs in self._inputs for part in (inputs.slots, inputs.tables)]
        return sum(part.nbytes for part in (*shared, *own))

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether the buffers can hold the batch's adapters, if it has any. None hold images."""
        return batch.vision is None and (batch.lora is None or self._lora is not None)

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Copies a step's inputs, and pads them to `size` sequences."""
        for layer, inputs in zip(self._layers, self._inputs, strict=True):
            self._stage(DecodeInputs.of(batch, layer), inputs, size)
        if batch.lora is not None and self._lora is not None:
            self._lora.fill(batch.lora, size)

    def view(self, size: int, context: int, adapted: bool = False) -> ForwardBatch:
        """The first `size` sequences as a model's input, with adapters if `adapted`."""
        first, starts = self._inputs[0], self._starts[: size + 1]
        groups = [
            AttentionMetadata(
                query_start=starts,
                seq_lens=inputs.seq_lens[:size],
                block_tables=inputs.tables[:size],
                slots=inputs.slots[:size],
                num_decodes=size,
                max_query_len=1,
                max_seq_len=context,
            )
            for inputs in self._inputs
        ]
        return ForwardBatch(
            first.input_ids[:size],
            first.positions[:size],
            self._rows[:size],
            groups[0],
            self._lora.view(size) if adapted and self._lora is not None else None,
            of_layers(groups, self._layout),
        )
