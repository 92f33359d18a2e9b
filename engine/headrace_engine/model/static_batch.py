"""The inputs of recorded decode steps, at addresses that stay, and how others get there."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..attention.base import AttentionMetadata
from ..lora.batch import StaticLoRA
from .base import ForwardBatch

# Block ids that a program copies at a time.
TABLE_BLOCK = 128


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Of sequences with one token each: `seq_lens` int32 [S], `tables` int32 [S, B], the others
    int64 [S]."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    tables: torch.Tensor

    @classmethod
    def of(cls, batch: ForwardBatch) -> "DecodeInputs":
        metadata = batch.metadata
        return cls(
            batch.input_ids,
            batch.positions,
            metadata.slots,
            metadata.seq_lens,
            metadata.block_tables,
        )


# (from, to, sequences with padding): brings inputs over, and makes padding of the others.
Stage = Callable[[DecodeInputs, DecodeInputs, int], None]


def stage_by_copies(source: DecodeInputs, target: DecodeInputs, size: int) -> None:
    """On any device, in a few launches."""
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
    """On CUDA devices, in one launch."""
    from ..triton_kernels.staging import stage_kernel

    count, width = source.tables.shape
    stage_kernel[(size,)](
        target.input_ids, target.positions, target.slots, target.seq_lens, target.tables,
        source.input_ids, source.positions, source.slots, source.seq_lens, source.tables,
        count, width, source.tables.stride(0), target.tables.stride(0),
        BLOCK=TABLE_BLOCK, num_warps=1,
    )  # fmt: skip


class StaticBatch:
    """Sequences behind those of a step have no keys, and slots below 0, which are not written.

    `lora` has the adapters of rows; None: there are none that a recording can hold.
    """

    def __init__(
        self, size: int, blocks: int, device: torch.device, lora: StaticLoRA | None = None
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._inputs = DecodeInputs(
            zeros(size),
            zeros(size),
            zeros(size).fill_(-1),
            zeros(size, dtype=torch.int32),
            zeros(size, blocks, dtype=torch.int32),
        )
        self._starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(size, device=device)
        self._stage: Stage = stage_by_kernel if device.type == "cuda" else stage_by_copies
        self._lora = lora

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Whether rows have adapters, for each kind of step that is to be recorded."""
        return (False,) if self._lora is None else (True, False)

    @property
    def num_bytes(self) -> int:
        inputs = self._inputs
        parts = (inputs.input_ids, inputs.positions, inputs.slots, inputs.seq_lens, inputs.tables)
        return sum(part.nbytes for part in (*parts, self._starts, self._rows))

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether there is room for its adapters, if it has any."""
        return batch.lora is None or self._lora is not None

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Takes a step's inputs, and padding up to `size` sequences."""
        self._stage(DecodeInputs.of(batch), self._inputs, size)
        if batch.lora is not None and self._lora is not None:
            self._lora.fill(batch.lora, size)

    def view(self, size: int, context: int, adapted: bool = False) -> ForwardBatch:
        """The first `size` sequences, as a model sees them; `adapted` with their adapters."""
        inputs = self._inputs
        metadata = AttentionMetadata(
            query_start=self._starts[: size + 1],
            seq_lens=inputs.seq_lens[:size],
            block_tables=inputs.tables[:size],
            slots=inputs.slots[:size],
            num_decodes=size,
            max_query_len=1,
            max_seq_len=context,
        )
        return ForwardBatch(
            inputs.input_ids[:size],
            inputs.positions[:size],
            self._rows[:size],
            metadata,
            self._lora.view(size) if adapted and self._lora is not None else None,
        )
