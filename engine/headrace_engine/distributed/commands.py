"""The commands that rank 0 sends to the other ranks: a number and its operands.

There is one message per step, without pickle. The tensors of a step follow in a broadcast, so that
on GPUs they never pass through the host.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from ..core.attention_backend import AttentionMetadata
from ..core.errors import RankFailed
from ..core.kv_cache_groups import KVLayout
from ..core.recurrent_state import StateBatch, StateRun
from ..lora.batch import LoRABatch, RowOwners, RowSlots
from ..models.base import BidirectionalSpan, ForwardBatch, VisionRows, of_groups, of_layers

Pairs = Sequence[tuple[int, int]]

# The number of values that sizes_of returns.
SIZES = 7
# In elements of 4 bytes: Triton compiles kernels again for tensors of another alignment.
ALIGNMENT = 4


class Command(IntEnum):
    """The commands of rank 0; comments name their operands and answers."""

    FORWARD = 1  # the sizes of a batch (see sizes_of), and the runs of its rows' adapters
    ALLOCATE = 2  # KV blocks on the device, and further ones of the draft head
    RESERVE = 3  # KV blocks in host memory
    COPY = 4  # (source, destination) blocks
    SWAP_OUT = 5  # (device, host) blocks
    SWAP_IN = 6  # (host, device) blocks
    MEASURE = 7  # the longest context; the answer is the number of KV blocks that fit
    MEASURED = 8  # the profile run is over
    CONNECT = 9  # all ranks have loaded the model
    RECORD = 10  # the longest context of CUDA graphs; 1 to keep them, 0 to measure their memory
    PUT_ADAPTER = 11  # a slot and the ranks of an adapter's matrices, which broadcasts follow
    ALLOCATE_ADAPTERS = 12  # room for adapters; 1 if also for adapters that change experts
    IMAGES = 13  # what the next FORWARD has of images (see numbers_of); broadcasts follow
    STATES = 14  # the recurrent states of the next FORWARD (see numbers_of_states); a broadcast
    ZERO = 15  # blocks that held recurrent states and get KV now
    HEAD = 16  # the width of hidden states, and the sizes of the draft head's batch; two broadcasts
    HEAD_LOGITS = 17  # rows and width of what the draft head's logits are made from; a broadcast
    COPY_HEAD = 18  # (source, destination) blocks of the draft head
    STOP = 19


class Disconnected(Exception):
    """The process at the other end of a connection has ended."""


def send(connection: Connection, command: Command, numbers: Iterable[int] = ()) -> None:
    """Sends a command. Raises OSError if the other process is gone."""
    connection.send_bytes(np.array([command, *numbers], dtype=np.int64).tobytes())


def receive(connection: Connection) -> tuple[Command, list[int]]:
    """Receives a command. Raises Disconnected."""
    command, *numbers = np.frombuffer(_bytes(connection), dtype=np.int64).tolist()
    return Command(command), numbers


def introduce(connection: Connection, content: Mapping[str, Any]) -> None:
    """Sends a rank its first message, which says what to load. Raises OSError."""
    connection.send_bytes(json.dumps(content, default=dict).encode())


def introduction(connection: Connection) -> dict[str, Any]:
    """Receives the first message. Raises Disconnected."""
    content: dict[str, Any] = json.loads(_bytes(connection))
    return content


def answer(connection: Connection, number: int = 0, problem: str = "") -> None:
    """Answers rank 0 with a number, or with why this rank cannot continue. Raises OSError."""
    connection.send_bytes(json.dumps([number, problem]).encode())


def await_answer(connection: Connection, rank: int) -> int:
    """Waits for a rank's answer. Raises Disconnected, and RankFailed with the rank's problem."""
    number, problem = json.loads(_bytes(connection))
    if problem:
        raise RankFailed(f"rank {rank}: {problem}")
    return int(number)


def _bytes(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except (EOFError, OSError) as error:
        raise Disconnected from error


def flat(pairs: Pairs) -> Iterable[int]:
    return chain.from_iterable(pairs)


def paired(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def sizes_of(batch: ForwardBatch) -> tuple[int, ...]:
    """Number of sequences, columns of the block tables, tokens, rows of logits; then the metadata's
    counts."""
    metadata = batch.metadata
    return (
        *metadata.block_tables.shape,
        len(batch.input_ids),
        len(batch.logits_rows),
        metadata.num_decodes,
        metadata.max_query_len,
        metadata.max_seq_len,
    )


def pack(batch: ForwardBatch, layout: KVLayout) -> torch.Tensor:
    """int32 [N]: all tensors of a batch, one after the other, each at a multiple of ALIGNMENT."""
    metadata, layers = (
        batch.metadata,
        [batch.metadata_of(one) for one in layout.layer_of_each_group],
    )
    parts = (
        metadata.query_start,
        metadata.seq_lens,
        torch.cat([one.block_tables.reshape(-1) for one in layers]),
        torch.cat([one.slots for one in layers]),
        batch.input_ids,
        batch.positions,
        batch.logits_rows,
    )
    sizes, groups = sizes_of(batch), len(layers)
    length, device = packed_length(sizes, groups), batch.input_ids.device
    packed = torch.zeros(length, dtype=torch.int32, device=device)
    for part, place in zip(parts, _cut(packed, sizes, groups), strict=True):
        place.copy_(part)
    return packed


def numbers_of(vision: VisionRows) -> list[int]:
    """Number of levels, rows and columns of the embeddings, 1 if there are positions, otherwise 0;
    then (first row, number of rows, sequence, first position) of each span."""
    spans = [
        (span.rows.start, span.rows.stop - span.rows.start, span.sequence, span.first)
        for span in vision.spans
    ]
    return [*vision.embeddings.shape, int(vision.positions is not None), *chain(*spans)]


def empty_vision(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> VisionRows:
    """The rows that `numbers_of` describes, whose tensors are to be received."""
    levels, rows, width, positioned, *rest = numbers
    spans = [
        BidirectionalSpan(slice(first, first + count), sequence, position)
        for first, count, sequence, position in zip(*(rest[at::4] for at in range(4)), strict=True)
    ]
    positions = torch.empty(3, rows, dtype=torch.int64, device=device) if positioned else None
    return VisionRows(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(levels, rows, width, dtype=dtype, device=device),
        positions,
        tuple(spans),
    )


def tensors_of(vision: VisionRows) -> Iterator[torch.Tensor]:
    """Its tensors, in the order in which they are broadcast."""
    yield vision.rows
    yield vision.embeddings
    if vision.positions is not None:
        yield vision.positions


def numbers_of_states(states: StateBatch) -> list[int]:
    """Numbers of sequences, of a state's blocks and of targets; then (sequence, begin, end, number
    of writes, writes) of each run."""
    runs = [(run.sequence, run.begin, run.end, len(run.writes), *run.writes) for run in states.runs]
    return [*states.sources.shape, len(states.targets), *chain(*runs)]


def packed_states(states: StateBatch) -> torch.Tensor:
    """int32 [N]: the tensors of a step's states, one after the other."""
    parts = (states.sources.flatten(), states.fresh, states.targets.flatten())
    return torch.cat([part.to(torch.int32) for part in parts])


def packed_states_length(numbers: Sequence[int]) -> int:
    """The length of what `packed_states` returns, given the numbers that describe it."""
    sequences, blocks, targets = numbers[:3]
    return sequences * (blocks + 1) + targets * blocks


def unpack_states(numbers: Sequence[int], packed: torch.Tensor) -> StateBatch:
    """Reads the states that `packed_states` wrote."""
    sequences, blocks, targets, *rest = numbers
    sizes = [sequences * blocks, sequences, targets * blocks]
    sources, fresh, after = torch.split(packed, sizes)
    runs: list[StateRun] = []
    at = 0
    while at < len(rest):
        sequence, begin, end, count = rest[at : at + 4]
        at += 4 + count
        runs.append(StateRun(sequence, begin, end, tuple(rest[at - count : at])))
    return StateBatch(
        sources=sources.long().view(sequences, blocks),
        fresh=fresh.bool(),
        targets=after.long().view(targets, blocks),
        runs=runs,
    )


def adapter_runs(lora: LoRABatch | None) -> list[int]:
    """The number of token runs, then (slot, rows) of each run of tokens with one adapter, then of
    each run of rows that sample. Empty if no row has an adapter."""
    if lora is None:
        return []
    assert lora.owners is not None, "the rows of a step are known to the host"
    tokens, logits = _runs(lora.owners.tokens), _runs(lora.owners.logits)
    return [len(tokens), *flat(tokens), *flat(logits)]


def row_owners(numbers: Sequence[int]) -> RowOwners:
    """Reads the result of `adapter_runs`."""
    count, *rest = numbers
    runs = paired(rest)
    return RowOwners(_rows(runs[:count]), _rows(runs[count:]))


def _runs(slots: RowSlots) -> list[tuple[int, int]]:
    changes = np.flatnonzero(np.diff(slots)) + 1
    return [(int(part[0]), len(part)) for part in np.split(slots, changes) if len(part)]


def _rows(runs: Pairs) -> RowSlots:
    slots, counts = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(slots, counts)


def packed_length(sizes: Sequence[int], groups: int) -> int:
    """Length of a packed batch with the block tables and slots of `groups` groups of layers."""
    return sum(map(_aligned, _lengths(sizes, groups)))


def unpack(sizes: Sequence[int], packed: torch.Tensor, layout: KVLayout) -> ForwardBatch:
    """Reads the batch that `pack` wrote."""
    sequences, columns, _, _, num_decodes, max_query_len, max_seq_len = sizes[:SIZES]
    groups = layout.groups.count
    query_start, seq_lens, tables, slots, ids, positions, rows = _cut(packed, sizes, groups)
    several = () if groups == 1 else (groups,)
    metadata = AttentionMetadata(
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=tables.view(*several, sequences, columns),
        slots=slots.long().view(*several, -1),
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    split = of_groups(metadata, layout)
    return ForwardBatch(
        input_ids=ids.long(),
        positions=positions.long(),
        logits_rows=rows.long(),
        metadata=split[0],
        layers=of_layers(split, layout),
    )


def _cut(packed: torch.Tensor, sizes: Sequence[int], groups: int) -> list[torch.Tensor]:
    lengths = _lengths(sizes, groups)
    places = torch.split(packed, [_aligned(length) for length in lengths])
    return [place[:length] for place, length in zip(places, lengths, strict=True)]


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _lengths(sizes: Sequence[int], groups: int) -> list[int]:
    sequences, columns, tokens, rows = sizes[:4]
    tables, slots = groups * sequences * columns, groups * tokens
    return [sequences + 1, sequences, tables, slots, tokens, tokens, rows]
