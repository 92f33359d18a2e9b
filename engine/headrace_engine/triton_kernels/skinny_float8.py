"""A product of few rows with weights in 8-bit floats, which are widened on their way to the tensor
cores: as `skinny`, with half the bytes to read. Rows keep their dtype.
"""

import triton.language as tl

from .fp8 import widened
from .jit import await_earlier, jit_unspecialized, prefetch_rows
from .skinny import biased, joined, keep


@jit_unspecialized("rows", "splits", "ahead")
def skinny_float8_kernel(
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
    with GROUP 0 there is one for each output. All else as of skinny_kernel.
    """
    tile = tl.program_id(0)
    share = inputs // DEPTH // splits * DEPTH
    first = tl.program_id(1) * share
    # What is beyond the last output or row is read from the last, and not written.
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
    last, sums = joined(partial, arrived, sums, tile, splits, SPLIT, ROWS, COLUMNS)
    if last:
        keep(output, biased(sums, bias, columns, BIAS), tile, rows, outputs, ROWS, COLUMNS)
