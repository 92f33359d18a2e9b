"""Turns a step's plan into the tensors of one ragged batch.

Arrays are filled on the host with numpy, a sequence at a time and never a token at a time, and
each goes to the device in one copy. Decides nothing and keeps nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .attention.base import AttentionMetadata
from .model.base import ForwardBatch
from .plan import ScheduledSequence, StepPlan
from .request import Sequence

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """`sampling` are the sequences of the rows of logits, in the plan's order."""

    forward: ForwardBatch
    sampling: tuple[Sequence, ...]


def build(plan: StepPlan, block_size: int, device: torch.device) -> StepBatch:
    """The plan as tensors on `device`. The plan's runs are not empty, decodes come first."""
    scheduled = plan.scheduled
    starts = np.array([item.start for item in scheduled], dtype=np.int64)
    lengths = np.array([item.length for item in scheduled], dtype=np.int64)
    query_start = np.zeros(len(scheduled) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    positions = _positions(starts, lengths, query_start)
    tables = _block_tables(scheduled, starts + lengths, block_size)
    owner = np.repeat(np.arange(len(scheduled)), lengths)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    samples = np.array([item.samples for item in scheduled], dtype=bool)
    metadata = AttentionMetadata(
        query_start=_tensor(query_start.astype(np.int32), device),
        seq_lens=_tensor((starts + lengths).astype(np.int32), device),
        block_tables=_tensor(tables.astype(np.int32), device),
        slots=_tensor(slots, device),
        num_decodes=_leading_decodes(lengths),
        max_query_len=int(lengths.max()),
        max_seq_len=int((starts + lengths).max()),
    )
    forward = ForwardBatch(
        input_ids=_tensor(_token_ids(scheduled, int(query_start[-1])), device),
        positions=_tensor(positions, device),
        logits_rows=_tensor(query_start[1:][samples] - 1, device),
        metadata=metadata,
    )
    return StepBatch(forward, tuple(item.sequence for item in scheduled if item.samples))


def _positions(starts: Ints, lengths: Ints, query_start: Ints) -> Ints:
    """start, start + 1, ... of each run, one after the other."""
    offsets: Ints = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lengths)
    return offsets


def _token_ids(scheduled: tuple[ScheduledSequence, ...], total: int) -> Ints:
    ids = np.empty(total, dtype=np.int64)
    at = 0
    for item in scheduled:
        end = at + item.length
        ids[at:end] = item.sequence.token_ids[item.start : item.start + item.length]
        at = end
    return ids


def _block_tables(
    scheduled: tuple[ScheduledSequence, ...], seq_lens: Ints, block_size: int
) -> Ints:
    counts = -(-seq_lens // block_size)
    tables = np.zeros((len(scheduled), int(counts.max())), dtype=np.int64)
    for row, (item, count) in enumerate(zip(scheduled, counts.tolist(), strict=True)):
        tables[row, :count] = item.sequence.block_table[:count]
    return tables


def _leading_decodes(lengths: Ints) -> int:
    longer = np.flatnonzero(lengths != 1)
    return int(longer[0]) if longer.size else len(lengths)


def _tensor(array: npt.NDArray[np.int32] | Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
