"""Tiles of keys or values from a paged cache [blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM].

The part of an address that is the same for all tiles is computed once, before the loop: the loops
that read caches are bound by instructions (benchmarks/compiled/loops.py counts them).
"""

import triton.language as tl

from .jit import jit


@jit
def first_seen(position: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """The first key that a position sees: of the last WINDOW keys, which may begin below 0, or with
    WINDOW below 0 of its chunk of -WINDOW positions."""
    first = position - WINDOW + 1
    if WINDOW < 0:
        first = position // (-WINDOW) * (-WINDOW)
    return first


@jit
def first_lines(
    kv_head: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """int32 [KEYS, DIM]: the offsets of a tile in its blocks. If blocks do not divide tiles,
    offsets depend on the tile, and `steps` includes them."""
    lines = kv_head * BLOCK_SIZE
    if KEYS % BLOCK_SIZE == 0:
        lines = lines + tl.arange(0, KEYS) % BLOCK_SIZE
    else:
        lines = lines + tl.zeros([KEYS], tl.int32)
    return (lines * HEAD_DIM)[:, None] + tl.arange(0, DIM)[None, :]


@jit
def steps(
    table: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """int64 [KEYS]: what to add to first_lines for the tile at position `at`, a multiple of KEYS;
    the table is not read for keys that are not `inside`."""
    keys = tl.arange(0, KEYS)
    if KEYS % BLOCK_SIZE == 0:
        numbers = at // BLOCK_SIZE + keys // BLOCK_SIZE
    else:
        numbers = (at + keys) // BLOCK_SIZE
    block = tl.load(table + numbers, mask=inside, other=0).to(tl.int64)
    found = block * (KV_HEADS * BLOCK_SIZE * HEAD_DIM)
    if KEYS % BLOCK_SIZE != 0:
        found += (at + keys) % BLOCK_SIZE * HEAD_DIM
    return found


@jit
def read(
    cache: tl.tensor,
    lines: tl.tensor,
    step: tl.tensor,
    inside: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """A tile [KEYS, DIM]; zeros for keys that are not `inside`, and beyond HEAD_DIM."""
    mask = inside[:, None]
    if HEAD_DIM != DIM:
        mask = mask & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    return tl.load(cache + step[:, None] + lines, mask=mask, other=0.0)
