"""Paged attention to latents (MLA): one KV head, whose values are the first elements of its keys.

Every query token has its own tile of heads, for prompts as for decodes: all heads share the keys,
so a tile has enough rows for tensor cores, and a tile of keys is read once for scores and values.
The keys of few tokens are cut in parts, which are merged as in `decode`. A part depends on the
token's own number of keys and on the given least size.
"""

import triton.language as tl

from .decode import extent, merge_parts
from .fp8 import narrowed, widened
from .jit import jit, jit_unspecialized
from .paged import first_lines, read, steps
from .softmax import softmax_step


@jit
def store_latent_kernel(
    latents: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    inverse_scale: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Program (token): writes its latent to cache [blocks * BLOCK_SIZE, WIDTH]. A slot below 0 is
    padding and is not written."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    at = tl.arange(0, BLOCK)
    mask = (at < WIDTH) & (slot >= 0)
    made = tl.load(latents + token * stride + at, mask=mask)
    tl.store(
        cache + slot * WIDTH + at, narrowed(made, inverse_scale, cache, BITS, LARGEST), mask=mask
    )


@jit
def _visible(
    token: tl.tensor, query_start: tl.tensor, seq_lens: tl.tensor, runs: tl.tensor
) -> tl.tensor:
    """(sequence, number of keys that the token sees)."""
    low = 0
    high = runs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= token:
            low = middle
        else:
            high = middle
    later = tl.load(query_start + low + 1) - token - 1
    return low, tl.load(seq_lens + low) - later


@jit_unspecialized("runs", "table_stride", "least_part")
def latent_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    tables: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    runs: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    least_part: tl.tensor,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Program (token, tile of heads, part). cache [blocks, BLOCK_SIZE, RANK + ROTARY].

    Writes `output` [T, HEADS, RANK] if SPLITS is 1, otherwise `partial` float32 [T, HEADS, SPLITS,
    RANK], and the log2 of the parts' sums to `log_sums` [T, HEADS, SPLITS].
    """
    WIDTH: tl.constexpr = RANK + ROTARY
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    run, length = _visible(token, query_start, seq_lens, runs)
    _, _, part = extent(length, least_part, SPLITS, KEYS, 0)
    start = split * part
    end = tl.minimum(start + part, length)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    angles = tl.arange(0, ROTARY_DIM)
    asked = query + token * query_token_stride + heads[:, None] * query_head_stride
    mask = (heads < HEADS)[:, None] & (dims < RANK)[None, :]
    tile = tl.load(asked + dims[None, :], mask=mask, other=0.0)
    rotated_mask = (heads < HEADS)[:, None] & (angles < ROTARY)[None, :]
    rotated = tl.load(asked + RANK + angles[None, :], mask=rotated_mask, other=0.0)
    factor = tl.zeros([ROWS], tl.float32) + scale * 1.4426950408889634
    table = tables + run.to(tl.int64) * table_stride
    lines = first_lines(0, WIDTH, BLOCK_SIZE, KEYS, DIM)
    rotated_lines = first_lines(0, WIDTH, BLOCK_SIZE, KEYS, ROTARY_DIM)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, DIM], tl.float32)
    for at in range(start, end, KEYS):
        seen = at + tl.arange(0, KEYS) < end
        step = steps(table, at, seen, 1, WIDTH, BLOCK_SIZE, KEYS)
        latent = widened(read(cache, lines, step, seen, RANK, DIM), tile, BITS)
        key = read(cache + RANK, rotated_lines, step, seen, ROTARY, ROTARY_DIM)
        key = widened(key, tile, BITS)
        scores = tl.dot(rotated, tl.trans(key), input_precision=EXACT)
        scores = tl.dot(tile, tl.trans(latent), scores, input_precision=EXACT)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest, total, attended = softmax_step(
            scores, factor, highest, total, attended, latent, EXACT
        )
    # A padding sequence has no keys and its output is zeros.
    attended = attended / tl.where(total > 0.0, total, 1.0)[:, None] * value_scale
    places = token * HEADS + heads
    if SPLITS == 1:
        tl.store(output + places[:, None] * RANK + dims[None, :], attended, mask=mask)
    elif start < end:
        parts = places * SPLITS + split
        tl.store(partial + parts[:, None] * RANK + dims[None, :], attended, mask=mask)
        tl.store(log_sums + parts, highest + tl.log2(total), mask=heads < HEADS)


@jit_unspecialized("runs", "least_part")
def merge_latent_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    runs: tl.tensor,
    least_part: tl.tensor,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """Program (token, head): merges its parts."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _, length = _visible(token, query_start, seq_lens, runs)
    _, _, part = extent(length, least_part, SPLITS, KEYS, 0)
    merge_parts(
        output, partial, log_sums, log_sums, token * HEADS + head, head, tl.cdiv(length, part),
        RANK, SPLITS, DIM, False,
    )  # fmt: skip
