"""Adapter products for a mixture's experts: x A, then its product with B, for tiles of rows that
share an expert, in the order of routing.

Rows of a tile may have different adapters: a program computes the rows of one adapter at a time.
"""

import triton.language as tl

from .experts import activated, places_of
from .jit import await_earlier, jit, jit_unspecialized


@jit_unspecialized("capacity")
def expert_gather_kernel(
    output: tl.tensor,
    x: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    live: tl.tensor,
    x_stride: tl.tensor,
    capacity: tl.tensor,
    PER_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile, BLOCK elements): copies rows of tokens x [T, WIDTH] to output [pairs, WIDTH],
    in the order of `order`."""
    await_earlier(DEPENDENT)
    tile = tl.program_id(0)
    if tile < tl.load(live):
        places, pairs, valid = places_of(order, tiles, tile, capacity, ROWS)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = valid[:, None] & (at < WIDTH)[None, :]
        rows = tl.load(x + (pairs // PER_TOKEN)[:, None] * x_stride + at[None, :], mask=mask)
        tl.store(output + places[:, None] * WIDTH + at[None, :], rows, mask=mask)


@jit_unspecialized("capacity")
def expert_activate_kernel(
    output: tl.tensor,
    gate_up: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    live: tl.tensor,
    capacity: tl.tensor,
    WIDTH: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile, BLOCK elements): the activation of gate_up [pairs, 2 WIDTH], to output [pairs,
    WIDTH] in the order of `order`."""
    await_earlier(DEPENDENT)
    tile = tl.program_id(0)
    if tile < tl.load(live):
        places, pairs, valid = places_of(order, tiles, tile, capacity, ROWS)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = valid[:, None] & (at < WIDTH)[None, :]
        source = gate_up + pairs[:, None] * (2 * WIDTH) + at[None, :]
        gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
        made = activated(gate, up, output, GELU, 0.0, 0.0)
        tl.store(output + places[:, None] * WIDTH + at[None, :], made, mask=mask)


@jit
def _places_with(
    slot: tl.tensor,
    owners: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    tile: tl.tensor,
    capacity: tl.tensor,
    PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Like places_of, for tokens with the adapter in `slot`."""
    places, pairs, valid = places_of(order, tiles, tile, capacity, ROWS)
    owner = tl.load(owners + pairs // PER_TOKEN, mask=valid, other=-1)
    return places, pairs, valid & (owner == slot)


@jit_unspecialized("capacity")
def expert_shrink_kernel(
    partial: tl.tensor,
    x: tl.tensor,
    down: tl.tensor,
    ranks: tl.tensor,
    owners: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    live: tl.tensor,
    capacity: tl.tensor,
    PER_TOKEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    INPUTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile, slot, columns of A): partial float32 [pairs, MAX_RANK] of the places in a tile
    whose tokens have the adapter in that slot. x [pairs, INPUTS] is in the order of `order`; down
    [slots, EXPERTS, MAX_RANK, INPUTS]; owners [T] are slots of tokens."""
    await_earlier(DEPENDENT)
    tile, slot = tl.program_id(0), tl.program_id(1)
    rank = tl.load(ranks + slot)
    first = tl.program_id(2) * COLUMNS
    if (first < rank) & (tile < tl.load(live)):
        places, pairs, own = _places_with(
            slot, owners, order, tiles, tile, capacity, PER_TOKEN, ROWS
        )
        if tl.sum(own.to(tl.int32), 0) > 0:
            columns = first + tl.arange(0, COLUMNS)
            wanted = columns < rank
            depth = tl.arange(0, DEPTH)
            matrix = slot.to(tl.int64) * EXPERTS + tl.load(tiles + tile)
            right_at = down + (matrix * MAX_RANK + columns)[None, :] * INPUTS + depth[:, None]
            left_at = x + places[:, None] * INPUTS + depth[None, :]
            sums = tl.zeros([ROWS, COLUMNS], tl.float32)
            for start in range(0, INPUTS, DEPTH):
                within = start + depth < INPUTS
                left = tl.load(left_at + start, mask=own[:, None] & within[None, :], other=0.0)
                mask = wanted[None, :] & within[:, None]
                right = tl.load(right_at + start, mask=mask, other=0.0)
                sums = tl.dot(left, right, sums, input_precision=EXACT)
            into = partial + places[:, None] * MAX_RANK + columns[None, :]
            tl.store(into, sums, mask=own[:, None] & wanted[None, :])


@jit_unspecialized("capacity")
def expert_expand_kernel(
    y: tl.tensor,
    partial: tl.tensor,
    up: tl.tensor,
    ranks: tl.tensor,
    owners: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    live: tl.tensor,
    capacity: tl.tensor,
    PER_TOKEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile, slot, columns of B): adds to y [pairs, OUTPUTS], whose rows are pairs, the
    product of `partial` and up [slots, EXPERTS, MAX_RANK, OUTPUTS] for tokens with the adapter in
    that slot."""
    await_earlier(DEPENDENT)
    tile, slot = tl.program_id(0), tl.program_id(1)
    rank = tl.load(ranks + slot)
    if (rank > 0) & (tile < tl.load(live)):
        places, pairs, own = _places_with(
            slot, owners, order, tiles, tile, capacity, PER_TOKEN, ROWS
        )
        if tl.sum(own.to(tl.int32), 0) > 0:
            columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
            inside = columns < OUTPUTS
            depth = tl.arange(0, DEPTH)
            matrix = slot.to(tl.int64) * EXPERTS + tl.load(tiles + tile)
            right_at = up + (matrix * MAX_RANK + depth)[:, None] * OUTPUTS + columns[None, :]
            left_at = partial + places[:, None] * MAX_RANK + depth[None, :]
            sums = tl.zeros([ROWS, COLUMNS], tl.float32)
            for start in range(0, rank, DEPTH):
                known = start + depth < rank
                left = tl.load(left_at + start, mask=own[:, None] & known[None, :], other=0.0)
                mask = known[:, None] & inside[None, :]
                right = tl.load(right_at + start * OUTPUTS, mask=mask, other=0.0)
                sums = tl.dot(left.to(right.dtype), right, sums, input_precision=EXACT)
            at = y + pairs[:, None] * OUTPUTS + columns[None, :]
            mask = own[:, None] & inside[None, :]
            before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, before + sums, mask=mask)
