"""Kernels that write keys and values to their slots, alone or after norms and rotary embedding.

A slot below 0 is padding and is not written. fp8 caches hold values divided by a scale and clamped
to the dtype's range.
"""

import triton.language as tl

from .fp8 import narrowed
from .jit import await_earlier, jit, prefetch


@jit
def store_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    key_inverse_scale: tl.tensor,
    value_inverse_scale: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Program (token): writes its keys and values, rows [KV_HEADS, HEAD_DIM], to the caches."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    heads, dims = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    mask = (heads < KV_HEADS) & (dims < HEAD_DIM) & (slot >= 0)
    line = (slot // BLOCK_SIZE * KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    source = heads * HEAD_DIM + dims
    made = tl.load(key + token * key_stride + source, mask=mask)
    fitting = narrowed(made, key_inverse_scale, key_cache, BITS, LARGEST)
    tl.store(key_cache + line * HEAD_DIM + dims, fitting, mask=mask)
    made = tl.load(value + token * value_stride + source, mask=mask)
    fitting = narrowed(made, value_inverse_scale, value_cache, BITS, LARGEST)
    tl.store(value_cache + line * HEAD_DIM + dims, fitting, mask=mask)


@jit
def _weighted(x: tl.tensor, weights: tl.tensor) -> tl.tensor:
    """Multiplies rows by one weight per element, rounded like a product in the weights' dtype."""
    product = x.to(weights.dtype).to(tl.float32) * weights.to(tl.float32)
    return product.to(weights.dtype).to(tl.float32)


@jit
def _rotated(
    x: tl.tensor,
    lines: tl.tensor,
    angles: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    mask: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """Loads rows x [HEADS, DIM], which begin at lines [HEADS, 1], normalises them (with NORM) and
    rotates them.

    All loads cover the whole tile: otherwise data would move between threads after barriers that
    wait for loads. Angles and weights are the same for all heads and come from the L1 cache.
    """
    dims = tl.arange(0, DIM)[None, :] + tl.zeros(x.shape, tl.int32)
    rotated = mask & (dims < 2 * WIDTH)
    if INTERLEAVED:
        is_first, other_one, angle = dims % 2 == 0, dims ^ 1, dims // 2
    else:
        is_first, angle = dims < WIDTH, dims % WIDTH
        other_one = tl.where(dims < WIDTH, dims + WIDTH, dims - WIDTH)
    partner = tl.where(dims < 2 * WIDTH, other_one, dims)
    other = tl.load(lines + partner, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angles + angle, mask=rotated, other=1.0)
    sine = tl.load(sin + angles + angle, mask=rotated, other=0.0)
    if NORM:
        own = tl.load(norm + dims, mask=mask, other=0.0)
        theirs = tl.load(norm + partner, mask=mask, other=0.0)
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = _weighted(x * scale, own)
        other = _weighted(other * scale, theirs)
    return x * cosine + other * tl.where(is_first, -sine, sine)


@jit
def rotate_kernel(
    output: tl.tensor,
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    key_inverse_scale: tl.tensor,
    value_inverse_scale: tl.tensor,
    eps: tl.tensor,
    qkv_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STORE: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (token, `HEADS` heads of one kind): queries, then keys, then (with STORE) values.

    Normalises queries and keys (with NORM) and rotates the first 2 WIDTH elements of each head.
    Writes queries to `output` [T, heads, HEAD_DIM]. Keys follow them there; with STORE keys and
    values are written to the caches instead.
    """
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if DEPENDENT > 0:
        PIECES: tl.constexpr = DIM // 32 if DIM > 32 else 1
        angles = token * WIDTH + tl.minimum(tl.arange(0, PIECES) * 32, WIDTH - 1)
        prefetch(cos + angles)
        prefetch(sin + angles)
        if STORE:
            prefetch(slots + token)
    await_earlier(DEPENDENT)
    QUERY_CHUNKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KEY_CHUNKS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    is_query = chunk < QUERY_CHUNKS
    is_value = chunk >= QUERY_CHUNKS + KEY_CHUNKS
    before = tl.where(is_query, 0, QUERY_CHUNKS) + tl.where(is_value, KEY_CHUNKS, 0)
    first = tl.where(is_query, 0, NUM_HEADS) + tl.where(is_value, KV_HEADS, 0)
    limit = tl.where(is_query, NUM_HEADS, KV_HEADS)
    heads = ((chunk - before) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, DIM)
    mask = (heads < limit) & (dims < HEAD_DIM)[None, :]
    lines = qkv + token * qkv_stride + (first + heads) * HEAD_DIM
    x = tl.load(lines + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if STORE:
        slot = tl.load(slots + token)
    if chunk < QUERY_CHUNKS + KEY_CHUNKS:
        norm = key_norm
        if is_query:
            norm = query_norm
        x = _rotated(
            x, lines, token * WIDTH, cos, sin, norm, eps, mask,
            HEAD_DIM, WIDTH, DIM, NORM, INTERLEAVED,
        )  # fmt: skip
    if STORE:
        if is_query:
            places = (token * NUM_HEADS + heads) * HEAD_DIM + dims[None, :]
            tl.store(output + places, x.to(output.dtype.element_ty), mask=mask)
        else:
            line = (slot // BLOCK_SIZE * KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
            places = line * HEAD_DIM + dims[None, :]
            rounded = x.to(qkv.dtype.element_ty)
            if is_value:
                fitting = narrowed(rounded, value_inverse_scale, value_cache, BITS, LARGEST)
                tl.store(value_cache + places, fitting, mask=mask & (slot >= 0))
            else:
                fitting = narrowed(rounded, key_inverse_scale, key_cache, BITS, LARGEST)
                tl.store(key_cache + places, fitting, mask=mask & (slot >= 0))
    else:
        line = token * (NUM_HEADS + KV_HEADS) + first + heads
        places = line * HEAD_DIM + dims[None, :]
        tl.store(output + places, x.to(output.dtype.element_ty), mask=mask)
