"""Paged attention of ragged runs of query tokens: prefill chunks, and drafts to verify.

FlashAttention-2's loop over a block table. A tile has some query tokens with all heads that share a
KV head. Tiles of keys begin at multiples of their size, so a row's sums are added in the same order
whatever else is in its tile or its batch.
"""

import triton.language as tl

from .fp8 import exact_half, widened
from .jit import jit, jit_unspecialized
from .paged import first_lines, first_seen, read, steps
from .softmax import capped, softmax_step, with_sinks


@jit
def _owner(
    query_start: tl.tensor,
    tile: tl.tensor,
    num_decodes: tl.tensor,
    num_runs: tl.tensor,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """(run, the tile's number in it). Run j has tiles from (tokens before it) // TOKENS + j on."""
    low = 0
    high = num_runs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start + num_decodes + middle) - num_decodes
        if before // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    before = tl.load(query_start + num_decodes + low) - num_decodes
    return low + num_decodes, tile - (before // TOKENS + low)


@jit
def _attend(
    state: tl.tensor,
    tile: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    asked: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    factor: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Adds keys [start, end) to a running softmax; without MASKED all rows see all of them."""
    highest, total, attended = state
    lines = first_lines(kv_head, HEAD_DIM, BLOCK_SIZE, KEYS, DIM)
    for at in range(start, end, KEYS):
        positions = at + tl.arange(0, KEYS)
        inside = positions < end
        step = steps(table, at, inside, KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS)
        key = widened(read(keys, lines, step, inside, HEAD_DIM, DIM), tile, BITS)
        scores = tl.dot(tile, tl.trans(key), input_precision=EXACT)
        scores, power = capped(scores, factor, SOFTCAP)
        if MASKED:
            # No written row needs a key at `end` or after it.
            seen = positions[None, :] <= asked[:, None]
            if WINDOW != 0:
                seen = seen & (positions[None, :] >= first_seen(asked, WINDOW)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        value = widened(read(values, lines, step, inside, HEAD_DIM, DIM), tile, BITS)
        highest, total, attended = softmax_step(
            scores, power, highest, total, attended, value, EXACT
        )
    return highest, total, attended


@jit_unspecialized("num_decodes", "num_runs", "table_stride")
def prefill_kernel(
    output: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    decode_count: tl.tensor,
    num_decodes: tl.tensor,
    num_runs: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    SINKS: tl.constexpr,
    MASKED: tl.constexpr,
    COUNTED: tl.constexpr,
) -> None:
    """Program (tile of query tokens, KV head), over the runs after the first `num_decodes`, or with
    COUNTED after the first `decode_count`, int32 [1]. With SINKS the heads' softmax includes
    `sinks` float32 [Hq].

    Tiles of keys that all rows see are not masked, which rounds differently; with MASKED all are.

    There are at most tokens // (ROWS // GROUP) + runs tiles; surplus programs do nothing.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    # The last tiles of a run see the most keys, so they begin first.
    backwards = tl.num_programs(0) - 1 - tl.program_id(0)
    if COUNTED:
        num_decodes = tl.load(decode_count)
    run, number = _owner(query_start, backwards, num_decodes, num_runs, TOKENS)
    kv_head = tl.program_id(1)
    begin = tl.load(query_start + run)
    count = tl.load(query_start + run + 1) - begin
    if number * TOKENS < count:
        length = tl.load(seq_lens + run)
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM)
        tokens = number * TOKENS + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        valid = (rows < TOKENS * GROUP) & (tokens < count)
        mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
        places = (begin + tokens).to(tl.int64)
        lines = places * query_token_stride + heads * query_head_stride
        tile = tl.load(query + lines[:, None] + dims[None, :], mask=mask, other=0.0)
        factor = tl.zeros([ROWS], tl.float32) + scale
        if HALF:
            tile, unit = exact_half(tile)
            factor = factor * unit
        asked = length - count + tokens
        lowest = length - count + number * TOKENS
        end = tl.minimum(lowest + TOKENS, length)
        state = (
            tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS, DIM], tl.float32),
        )
        table = tables + run.to(tl.int64) * table_stride
        if WINDOW != 0:
            start = tl.maximum(first_seen(lowest, WINDOW), 0) // KEYS * KEYS
        elif MASKED:
            start = 0
        else:
            start = (lowest + 1) // KEYS * KEYS
            state = _attend(
                state, tile, keys, values, table, asked, kv_head, 0, start, factor,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, KEYS, DIM, EXACT, BITS, False,
            )  # fmt: skip
        state = _attend(
            state, tile, keys, values, table, asked, kv_head, start, end, factor,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, KEYS, DIM, EXACT, BITS, True,
        )  # fmt: skip
        highest, total, attended = state
        total = with_sinks(total, highest, sinks, heads, SINKS)
        attended = attended / tl.where(total > 0.0, total, 1.0)[:, None] * value_scale
        out = (places * KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(output + out, attended, mask=mask)
