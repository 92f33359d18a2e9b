"""Paged attention of one query token a sequence: parts of the keys in parallel, then merged.

Flash decoding (Dao et al. 2023) over a block table. How a sequence is split depends only on its own
length and on the given least size of parts.
"""

import triton.language as tl

from .fp8 import exact_half, widened
from .jit import await_earlier, jit, jit_unspecialized, prefetch
from .paged import first_lines, first_seen, read, steps
from .softmax import capped, softmax_step, with_sinks


@jit
def extent(
    length: tl.tensor,
    least_part: tl.tensor,
    MAX_SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """(first visible key, begin of the first part, keys of a part), in whole tiles."""
    first = 0
    if WINDOW != 0:
        first = tl.maximum(first_seen(length - 1, WINDOW), 0)
    begin = first // KEYS * KEYS
    part = tl.cdiv(tl.cdiv(length - begin, MAX_SPLITS), KEYS) * KEYS
    return first, begin, tl.maximum(part, least_part)


@jit
def length_of(
    sequence: tl.tensor, seq_lens: tl.tensor, decode_count: tl.tensor, COUNTED: tl.constexpr
) -> tl.tensor:
    """The keys of a decode; with COUNTED 0 for the sequences after the first `decode_count`."""
    length = tl.load(seq_lens + sequence)
    if COUNTED:
        length = tl.where(sequence < tl.load(decode_count), length, 0)
    return length


@jit
def merge_parts(
    output: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    sinks: tl.tensor,
    place: tl.tensor,
    head: tl.tensor,
    count: tl.tensor,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Merges one head: the mean of its `count` parts, weighted with their softmax sums."""
    splits = tl.arange(0, MAX_SPLITS)
    made = splits < count
    dims = tl.arange(0, DIM)
    # Bypasses the L1 cache, which does not see what other multiprocessors write.
    sums = tl.load(
        log_sums + place * MAX_SPLITS + splits,
        mask=made,
        other=float("-inf"),
        cache_modifier=".cg",
    )
    highest = tl.max(sums, 0)
    weights = tl.exp2(sums - tl.where(highest == float("-inf"), 0.0, highest))
    parts = tl.load(
        partial + (place * MAX_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :],
        mask=made[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    total = with_sinks(tl.sum(weights, 0), highest, sinks, head, SINKS)
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(output + place * HEAD_DIM + dims, merged, mask=dims < HEAD_DIM)


@jit
def _attend(
    tile: tl.tensor,
    factor: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
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
) -> tl.tensor:
    """Computes the running softmax of keys [start, end)."""
    lines = first_lines(kv_head, HEAD_DIM, BLOCK_SIZE, KEYS, DIM)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, DIM], tl.float32)
    for at in range(start, end, KEYS):
        positions = at + tl.arange(0, KEYS)
        inside = positions < end
        seen = inside
        if WINDOW != 0:
            seen = seen & (positions >= first)
        step = steps(table, at, inside, KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS)
        key = widened(read(keys, lines, step, seen, HEAD_DIM, DIM), tile, BITS)
        scores = tl.dot(tile, tl.trans(key), input_precision=EXACT)
        scores, power = capped(scores, factor, SOFTCAP)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        value = widened(read(values, lines, step, seen, HEAD_DIM, DIM), tile, BITS)
        highest, total, attended = softmax_step(
            scores, power, highest, total, attended, value, EXACT
        )
    return highest, total, attended


@jit
def _merge_if_last(
    output: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    arrived: tl.tensor,
    sinks: tl.tensor,
    sequence: tl.tensor,
    kv_head: tl.tensor,
    count: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Of the `count` programs of a sequence's KV head, the last one to arrive merges all heads'
    parts."""
    place = sequence * KV_HEADS + kv_head
    counter = arrived + place
    # Barriers: all threads' parts are written before the counter, and read after it.
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if before == count - 1:
        for head in range(0, GROUP):
            merge_parts(
                output, partial, log_sums, sinks, place * GROUP + head, kv_head * GROUP + head,
                count, HEAD_DIM, MAX_SPLITS, DIM, SINKS,
            )  # fmt: skip
        tl.store(counter, 0)


@jit_unspecialized("table_stride", "least_part")
def decode_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    arrived: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    least_part: tl.tensor,
    decode_count: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    WHOLE: tl.constexpr,
    MERGE: tl.constexpr,
    SINKS: tl.constexpr,
    COUNTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (sequence, KV head, part). Caches are [blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM]. With
    SINKS the heads' softmax includes `sinks` float32 [Hq], once.

    Writes `output` if WHOLE says that no sequence has a second part, otherwise `partial` float32
    [S, Hq, MAX_SPLITS, HEAD_DIM], and the log2 of the parts' sums to `log_sums` [S, Hq,
    MAX_SPLITS]. With MERGE the last program of a sequence and KV head merges its parts, always in
    their order; `arrived` int32 [S, KV_HEADS] is zeros before and after. With COUNTED only the
    first `decode_count`, int32 [1], sequences are decodes; outputs of the others are zeros.
    """
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    table = tables + sequence * table_stride
    if DEPENDENT > 0:
        # The table gives the keys' addresses: three loads, each after the other.
        prefetch(seq_lens + sequence)
        prefetch(table + tl.minimum(split * least_part // BLOCK_SIZE, table_stride - 1))
    await_earlier(DEPENDENT)
    length = length_of(sequence, seq_lens, decode_count, COUNTED)
    first, begin, part = extent(length, least_part, MAX_SPLITS, KEYS, WINDOW)
    start = begin + split * part
    end = tl.minimum(start + part, length)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    row_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows
    asked = query + sequence * query_token_stride + heads[:, None] * query_head_stride
    tile = tl.load(asked + dims[None, :], mask=row_mask, other=0.0)
    factor = tl.zeros([ROWS], tl.float32) + scale
    if HALF:
        tile, unit = exact_half(tile)
        factor = factor * unit
    highest, total, attended = _attend(
        tile, factor, keys, values, table, kv_head, first, start, end,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, ROWS, KEYS, DIM, EXACT, BITS,
    )  # fmt: skip
    if WHOLE:
        # Padding rows use the sink of the last head.
        own = tl.minimum(heads, KV_HEADS * GROUP - 1)
        total = with_sinks(total, highest, sinks, own, SINKS)
    # A padding sequence has no keys and its output is zeros.
    attended = attended / tl.where(total > 0.0, total, 1.0)[:, None] * value_scale
    places = sequence * KV_HEADS * GROUP + heads
    if WHOLE:
        tl.store(output + places[:, None] * HEAD_DIM + dims[None, :], attended, mask=row_mask)
    elif start < end:
        parts = places * MAX_SPLITS + split
        tl.store(partial + parts[:, None] * HEAD_DIM + dims[None, :], attended, mask=row_mask)
        tl.store(log_sums + parts, highest + tl.log2(total), mask=rows < GROUP)
        if MERGE:
            _merge_if_last(
                output, partial, log_sums, arrived, sinks, sequence, kv_head,
                tl.cdiv(length - begin, part), KV_HEADS, GROUP, HEAD_DIM, MAX_SPLITS, DIM, SINKS,
            )  # fmt: skip
    elif MERGE:
        if length == 0:
            tl.store(output + places[:, None] * HEAD_DIM + dims[None, :], attended, mask=row_mask)


@jit_unspecialized("least_part")
def merge_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    least_part: tl.tensor,
    decode_count: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
    COUNTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (sequence, query head): merges its parts."""
    await_earlier(DEPENDENT)
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = length_of(sequence, seq_lens, decode_count, COUNTED)
    _, begin, part = extent(length, least_part, MAX_SPLITS, KEYS, WINDOW)
    count = tl.cdiv(length - begin, part)
    merge_parts(
        output, partial, log_sums, sinks, sequence * HEADS + head, head, count,
        HEAD_DIM, MAX_SPLITS, DIM, SINKS,
    )  # fmt: skip
