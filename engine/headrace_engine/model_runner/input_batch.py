"""Turns a SchedulerOutput into the tensors of one ragged batch.

Arrays are filled on the host with numpy, by sequence and never by token, and copied to the device.
"""

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..core.attention_backend import AttentionMetadata
from ..core.kv_cache_groups import ONE_GROUP, KVLayout
from ..core.recurrent_state import StateBatch, StateRun
from ..core.step_plan import SampleRow, ScheduledSequence, SchedulerOutput
from ..device.transfer import Transfer
from ..models.base import ForwardBatch, of_groups, of_layers
from .future_tokens import FutureTokens

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of a step.

    `sampling` describes the first rows of logits, in the order of the scheduled sequences. The rows
    after them belong to `scoring`, the runs whose prompt log probabilities are computed. `places`
    and `sources` are those of the step's FutureTokens, if it has any.
    """

    forward: ForwardBatch
    sampling: tuple[SampleRow, ...]
    scoring: tuple[ScheduledSequence, ...] = ()
    places: torch.Tensor | None = None
    sources: torch.Tensor | None = None


def build(
    scheduler_output: SchedulerOutput,
    block_size: int,
    device: torch.device,
    transfer: Transfer | None = None,
    future_tokens: FutureTokens | None = None,
    layout: KVLayout = ONE_GROUP,
    images: bool = False,
) -> StepBatch:
    """Makes the tensors of a step on `device`. Its runs are not empty and its decodes come first.

    `transfer` copies the arrays there; None makes one. `future_tokens` says which tokens the step
    before this one chooses. `layout` is that of the KV cache. `images`: prompts may have images.
    """
    scheduled = scheduler_output.scheduled
    starts = np.array([item.start for item in scheduled], dtype=np.int64)
    lengths = _lengths(scheduled)
    query_start = np.zeros(len(scheduled) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    positions = _positions(starts, lengths, query_start)
    rotated = _after_images(scheduled, positions, query_start) if images else positions
    tables = _block_tables(scheduled, starts + lengths, block_size, layout.groups.count)
    if layout.parts:
        tables *= np.array(layout.parts)[:, None, None]
    owner = np.repeat(np.arange(len(scheduled)), lengths)
    slots = tables[..., owner, positions // block_size] * block_size + positions % block_size
    arrays = (
        query_start.astype(np.int32),
        (starts + lengths).astype(np.int32),
        tables.astype(np.int32),
        np.ascontiguousarray(slots),
        _token_ids(scheduled, int(query_start[-1])),
        rotated,
        _logits_rows(scheduled, query_start),
    )
    linked = (
        ()
        if future_tokens is None or not len(future_tokens.places)
        else (future_tokens.places, future_tokens.sources)
    )
    tensors = (transfer or Transfer(device))((*arrays, *linked))
    metadata = AttentionMetadata(
        query_start=tensors[0],
        seq_lens=tensors[1],
        block_tables=tensors[2],
        slots=tensors[3],
        num_decodes=_leading_decodes(lengths),
        max_query_len=int(lengths.max()),
        max_seq_len=int((starts + lengths).max()),
    )
    groups = of_groups(metadata, layout)
    states = _states(scheduled, query_start, device) if layout.groups.state else None
    forward = ForwardBatch(
        input_ids=tensors[4],
        positions=tensors[5],
        logits_rows=tensors[6],
        metadata=groups[0],
        layers=of_layers(groups, layout),
        states=states,
    )
    sampling = _sampling(scheduled) if future_tokens is None else future_tokens.sampling
    places, sources = tensors[7:] if linked else (None, None)
    return StepBatch(forward, sampling, _scoring(scheduled), places, sources)


def _drafted(scheduled: tuple[ScheduledSequence, ...]) -> bool:
    return any([item.drafts for item in scheduled])


def _lengths(scheduled: tuple[ScheduledSequence, ...]) -> Ints:
    if not _drafted(scheduled):
        return np.array([item.length for item in scheduled], dtype=np.int64)
    return np.array([item.length + len(item.drafts) for item in scheduled], dtype=np.int64)


def _positions(starts: Ints, lengths: Ints, query_start: Ints) -> Ints:
    """The positions of all runs: start, start + 1, ... of each."""
    offsets: Ints = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lengths)
    return offsets


def _after_images(
    scheduled: tuple[ScheduledSequence, ...], positions: Ints, query_start: Ints
) -> Ints:
    """The positions for rotations: images before a token may move it (M-RoPE)."""
    if not any([item.sequence.request.images for item in scheduled]):
        return positions
    moved = positions.copy()
    for index, item in enumerate(scheduled):
        run = moved[query_start[index] : query_start[index + 1]]
        images = item.sequence.request.images
        if images and item.start >= images[-1].span.end:
            run += images[-1].shift
            continue
        shift = 0
        for image in images:
            run[max(0, image.span.end - item.start) :] += image.shift - shift
            shift = image.shift
    return moved


def _logits_rows(scheduled: tuple[ScheduledSequence, ...], query_start: Ints) -> Ints:
    """The tokens whose logits are needed: first those that sample, then those that are scored."""
    sampling = _sampling_rows(scheduled, query_start)
    if not _scoring(scheduled):
        return sampling
    scored = [
        np.arange(begin, begin + item.scores)
        for item, begin in zip(scheduled, query_start.tolist(), strict=False)
    ]
    return np.concatenate([sampling, *scored])


def _scoring(scheduled: tuple[ScheduledSequence, ...]) -> tuple[ScheduledSequence, ...]:
    return tuple([item for item in scheduled if item.scores])


def _sampling_rows(scheduled: tuple[ScheduledSequence, ...], query_start: Ints) -> Ints:
    """The last token of each run that samples, with its drafts."""
    if not _drafted(scheduled):
        samples = np.array([item.samples for item in scheduled], dtype=bool)
        last: Ints = query_start[1:][samples] - 1
        return last
    wanted = np.array([item.samples and 1 + len(item.drafts) for item in scheduled], dtype=np.int64)
    owner = np.repeat(np.arange(len(scheduled)), wanted)
    before = np.cumsum(wanted)[owner]
    rows: Ints = query_start[1:][owner] + np.arange(len(owner)) - before
    return rows


def _sampling(scheduled: tuple[ScheduledSequence, ...]) -> tuple[SampleRow, ...]:
    if not _drafted(scheduled):
        return tuple([SampleRow(item.sequence) for item in scheduled if item.samples])
    rows: list[SampleRow] = []
    for item in scheduled:
        if item.samples:
            rows.append(SampleRow(item.sequence))
            for count in range(len(item.drafts)):
                rows.append(SampleRow(item.sequence, item.drafts[: count + 1]))
    return tuple(rows)


def _token_ids(scheduled: tuple[ScheduledSequence, ...], total: int) -> Ints:
    if total == len(scheduled):  # only decodes
        last = [item.sequence.token_ids[item.start] for item in scheduled]
        return np.array(last, dtype=np.int64)
    ids = np.empty(total, dtype=np.int64)
    at = 0
    for item in scheduled:
        end = at + item.length
        ids[at:end] = item.sequence.token_ids[item.start : item.start + item.length]
        at = end
        if item.drafts:
            at += len(item.drafts)
            ids[end:at] = item.drafts
    return ids


def _block_tables(
    scheduled: tuple[ScheduledSequence, ...], seq_lens: Ints, block_size: int, groups: int
) -> Ints:
    """The block tables [S, B], or [G, S, B] with several groups."""
    counts = -(-seq_lens // block_size)
    shape = len(scheduled), int(counts.max())
    # The fastest way from lists to an array.
    used = array("q")
    for item, count in zip(scheduled, (counts * groups).tolist(), strict=True):
        used.fromlist(item.sequence.block_table[:count])
    filled, blocks = np.arange(shape[1]) < counts[:, None], np.frombuffer(used, dtype=np.int64)
    if groups == 1:
        tables = np.zeros(shape, dtype=np.int64)
        tables[filled] = blocks
        return tables
    tables = np.zeros((groups, *shape), dtype=np.int64)
    tables[:, filled] = blocks.reshape(-1, groups).T
    return tables


def _states(
    scheduled: tuple[ScheduledSequence, ...], query_start: Ints, device: torch.device
) -> StateBatch:
    """The recurrent states of the batch; runs are cut where snapshots are taken."""
    runs: list[StateRun] = []
    targets = [item.sequence.state_blocks for item in scheduled]
    for index, item in enumerate(scheduled):
        begin, end = int(query_start[index]), int(query_start[index + 1])
        offset, writes = begin - item.start, {end: [index]}
        for position, blocks in item.sequence.snapshots:
            if item.start < position <= item.start + item.length:
                writes.setdefault(position + offset, []).append(len(targets))
                targets.append(blocks)
        for cut in sorted(writes):
            runs.append(StateRun(index, begin, cut, tuple(writes[cut])))
            begin = cut
    sources = [item.sequence.state_source or item.sequence.state_blocks for item in scheduled]
    return StateBatch(
        sources=torch.tensor(sources, device=device),
        fresh=torch.tensor([item.start == 0 for item in scheduled], device=device),
        targets=torch.tensor(targets, device=device),
        runs=tuple(runs),
    )


def _leading_decodes(lengths: Ints) -> int:
    longer = np.flatnonzero(lengths != 1)
    return int(longer[0]) if longer.size else len(lengths)
