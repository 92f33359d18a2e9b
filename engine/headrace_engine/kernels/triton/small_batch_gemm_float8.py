"""A product of few rows with 8-bit float weights, which are converted before the tensor cores: like
`small_batch_gemm`, with half the bytes to read. Rows keep their dtype."""

import triton.language as tl

from .fp8 import widened
from .jit import await_earlier, jit_unspecialized, prefetch_rows
from .small_batch_gemm import add_bias, store_outputs, sum_splits


@jit_unspecialized("rows", "splits", "ahead")
def small_batch_float8_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    x_stride: tl.tensor,
    scales_stride: tl.tensor,
    ahead: tl.tensor,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LINES: tl.constexpr,
) -> None:
    """Program (tile of outputs, part): output [rows, outputs] = x . weight^T (+ bias).

    weight [outputs, inputs] times scales [outputs, groups of GROUP inputs], a multiple of DEPTH;
    GROUP 0 means one scale for each output. Everything else is as in small_batch_kernel.
    """
    tile = tl.program_id(0)
    share = inputs // DEPTH // splits * DEPTH
    first = tl.program_id(1) * share
    # Beyond the last output or row, the last is read instead, and nothing is written.
    columns = tl.minimum(tile * COLUMNS + tl.arange(0, COLUMNS), outputs - 1)
    lines = tl.minimum(tl.arange(0, ROWS), rows - 1)
    depth = tl.arange(0, DEPTH)
    begins = weight + columns.to(tl.int64) * inputs
    if DEPENDENT > 0:
        prefetch_rows(begins + first, ahead, LINES)
    await_earlier(DEPENDENT)
    own = scales + columns * scales_stride
    left = begins[:, None] + depth[None, :]
    right = x + lines.to(tl.int64)[None, :] * x_stride + depth[:, None]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(first, first + share, DEPTH):
        taken = tl.load(right + start)
        wide = widened(tl.load(left + start), taken, BITS)
        if GROUP > 0:
            sums += tl.dot(wide, taken) * tl.load(own + start // GROUP)[:, None]
        else:
            sums = tl.dot(wide, taken, sums)
    if GROUP == 0:
        sums *= tl.load(own)[:, None]
    last, sums = sum_splits(partial, arrived, sums, tile, splits, SPLIT, ROWS, COLUMNS)
    if last:
        store_outputs(
            output, add_bias(sums, bias, columns, BIAS), tile, rows, outputs, ROWS, COLUMNS
        )
