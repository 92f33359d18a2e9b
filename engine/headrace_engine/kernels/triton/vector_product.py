"""A matrix product of one row, without tensor cores. No program waits for another, since each one
computes its outputs completely. It issues all reads of a part of its weights at once."""

import triton.language as tl

from .fp8 import widened
from .jit import await_earlier, jit


@jit
def vector_product_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    scales_stride: tl.tensor,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile of outputs): output [outputs] = x [inputs] . weight^T (+ bias).

    weight [outputs, inputs] of floats of 16 or 8 bits, times scales [outputs, 1] if SCALED;
    `inputs` is PARTS times DEPTH. No step writes weights, so the first part is read before earlier
    kernels have ended.
    """
    tile = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Places after the last output read the weights of the last one; their results are not written.
    columns = tl.minimum(tile, outputs - 1)
    depth = tl.arange(0, DEPTH)
    left = weight + columns.to(tl.int64)[:, None] * inputs + depth[None, :]
    raw = tl.load(left)
    await_earlier(DEPENDENT)
    row = tl.load(x + depth).to(tl.float32)[None, :]
    sums = widened(raw, row, BITS) * row
    for part in tl.static_range(1, PARTS):
        row = tl.load(x + part * DEPTH + depth).to(tl.float32)[None, :]
        sums += widened(tl.load(left + part * DEPTH), row, BITS) * row
    found = tl.sum(sums, 1)
    if SCALED:
        found *= tl.load(scales + columns * scales_stride)
    if BIAS:
        found += tl.load(bias + columns).to(tl.float32)
    tl.store(output + tile, found, mask=tile < outputs)
