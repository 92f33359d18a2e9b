"""Adapter products of a linear layer: x A, then its product with B, for tiles of rows that share an
adapter.

The kernels read the tiles on the device, so one launch serves any assignment of adapters to rows.
As in Punica (Chen et al., 2023) and S-LoRA (Sheng et al., 2023), without their atomic sums.
"""

import triton.language as tl

from .jit import await_earlier, jit_unspecialized


@jit_unspecialized("total")
def lora_shrink_kernel(
    partial: tl.tensor,
    x: tl.tensor,
    down: tl.tensor,
    ends: tl.tensor,
    tiles: tl.tensor,
    order: tl.tensor,
    total: tl.tensor,
    x_stride: tl.tensor,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile, columns of A, chunk of inputs): partial [chunks, total, RANKS] of a tile's
    places in `order`. down [slots, RANKS, INPUTS]; `ends` as in lora.linear."""
    await_earlier(DEPENDENT)
    tile = tl.program_id(0)
    slot = tl.load(tiles + 4 * tile)
    ranks = tl.load(ends + slot * PARTS + PARTS - 1, mask=slot >= 0, other=0)
    if tl.program_id(1) * COLUMNS < ranks:
        inside = tl.arange(0, ROWS) < tl.load(tiles + 4 * tile + 2)
        places = tl.load(tiles + 4 * tile + 1) + tl.arange(0, ROWS)
        lines = tl.load(order + places, mask=inside, other=0).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        wanted = columns < ranks
        matrix = down + slot.to(tl.int64) * RANKS * INPUTS
        depth = tl.program_id(2) * CHUNK + tl.arange(0, DEPTH)
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, CHUNK, DEPTH):
            at = start + depth
            left = tl.load(
                x + lines[:, None] * x_stride + at[None, :],
                mask=inside[:, None] & (at < INPUTS)[None, :],
                other=0.0,
            )
            right = tl.load(
                matrix + columns[None, :] * INPUTS + at[:, None],
                mask=wanted[None, :] & (at < INPUTS)[:, None],
                other=0.0,
            )
            sums = tl.dot(left, right, sums, input_precision=EXACT)
        into = (tl.program_id(2).to(tl.int64) * total + places)[:, None] * RANKS + columns[None, :]
        tl.store(partial + into, sums, mask=inside[:, None] & wanted[None, :])


@jit_unspecialized("total")
def lora_expand_kernel(
    y: tl.tensor,
    partial: tl.tensor,
    up: tl.tensor,
    ends: tl.tensor,
    tiles: tl.tensor,
    order: tl.tensor,
    total: tl.tensor,
    y_stride: tl.tensor,
    OUTPUTS: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile, columns of one part): adds to rows of y [T, OUTPUTS] the sum of `partial`
    [CHUNKS, total, RANKS] times up [slots, MAX_RANK, OUTPUTS].

    Parts end before columns SECOND and THIRD, which are OUTPUTS if there are fewer parts.
    """
    await_earlier(DEPENDENT)
    tile, block = tl.program_id(0), tl.program_id(1)
    # Not tl.cdiv: Triton 3.6 cannot add its constants.
    first: tl.constexpr = (SECOND + COLUMNS - 1) // COLUMNS
    second: tl.constexpr = (THIRD - SECOND + COLUMNS - 1) // COLUMNS
    part = (block >= first).to(tl.int32) + (block >= first + second).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, SECOND, THIRD))
    limit = tl.where(part == 0, SECOND, tl.where(part == 1, THIRD, OUTPUTS))
    before = tl.where(part == 0, 0, tl.where(part == 1, first, first + second))
    slot = tl.load(tiles + 4 * tile)
    bounds = ends + slot * PARTS + part
    low = tl.load(bounds - 1, mask=(slot >= 0) & (part > 0), other=0)
    high = tl.load(bounds, mask=slot >= 0, other=0)
    if low < high:
        inside = tl.arange(0, ROWS) < tl.load(tiles + 4 * tile + 2)
        places = tl.load(tiles + 4 * tile + 1) + tl.arange(0, ROWS)
        lines = tl.load(order + places, mask=inside, other=0).to(tl.int64)
        columns = begin + (block - before) * COLUMNS + tl.arange(0, COLUMNS)
        wanted = columns < limit
        matrix = up + slot.to(tl.int64) * MAX_RANK * OUTPUTS
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, high - low, DEPTH):
            ranks = start + tl.arange(0, DEPTH)
            known = low + ranks < high
            right = tl.load(
                matrix + ranks[:, None] * OUTPUTS + columns[None, :],
                mask=known[:, None] & wanted[None, :],
                other=0.0,
            )
            inner = tl.zeros([ROWS, DEPTH], tl.float32)
            # Unrolled, so that all chunks are loaded at the same time.
            for chunk in tl.static_range(CHUNKS):
                at = (places + chunk * total).to(tl.int64)
                inner += tl.load(
                    partial + at[:, None] * RANKS + (low + ranks)[None, :],
                    mask=inside[:, None] & known[None, :],
                    other=0.0,
                )
            sums = tl.dot(inner.to(right.dtype), right, sums, input_precision=EXACT)
        at = y + lines[:, None] * y_stride + columns[None, :]
        mask = inside[:, None] & wanted[None, :]
        own = tl.load(at, mask=mask, other=0.0)
        tl.store(at, own.to(tl.float32) + sums, mask=mask)
