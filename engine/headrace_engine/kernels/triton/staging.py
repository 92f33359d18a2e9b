"""A kernel that copies a decode step's inputs to the buffers of a recorded step."""

import triton.language as tl

from .jit import jit_unspecialized


@jit_unspecialized("count", "width", "new_stride", "stride")
def stage_kernel(
    ids: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    seq_lens: tl.tensor,
    tables: tl.tensor,
    new_ids: tl.tensor,
    new_positions: tl.tensor,
    new_slots: tl.tensor,
    new_seq_lens: tl.tensor,
    new_tables: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    new_stride: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (sequence). Sequences from `count` on are padding: no keys, a slot below 0."""
    row = tl.program_id(0).to(tl.int64)
    given = row < count
    tl.store(ids + row, tl.load(new_ids + row, mask=given, other=0))
    tl.store(positions + row, tl.load(new_positions + row, mask=given, other=0))
    tl.store(slots + row, tl.load(new_slots + row, mask=given, other=-1))
    tl.store(seq_lens + row, tl.load(new_seq_lens + row, mask=given, other=0))
    if given:
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            block = tl.load(new_tables + row * new_stride + at, mask=at < width)
            tl.store(tables + row * stride + at, block, mask=at < width)
