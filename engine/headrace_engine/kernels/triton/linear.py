"""A kernel for linear layers, with float or 8-bit float weights, that adds each sum in the same
order for any number of rows.

cuBLAS chooses tiles and splits of the inner dimension by the number of rows, so a row's last bits
depend on how many other rows there are. Here one tile size serves all, and nothing is split, as in
other batch-invariant kernels (He et al., "Defeating Nondeterminism in LLM Inference", 2025).
"""

import triton.language as tl

from .fp8 import widened
from .jit import jit_unspecialized


@jit_unspecialized("rows")
def linear_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    scales_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Program (tile of rows, tile of outputs): output [T, OUTPUTS] = x . weight^T (+ bias).

    Successive programs compute different rows with the same tile of weights. If SCALED, weights are
    8-bit floats times scales [OUTPUTS, groups of GROUP inputs]. GROUP is a multiple of DEPTH; 0
    means one scale for each output.
    """
    tiles = tl.cdiv(rows, ROWS)
    lines = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) // tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    if SCALED:
        own = scales + columns * scales_stride
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        inside = start + depth < INPUTS
        left = tl.load(
            x + lines[:, None] * x_stride + (start + depth)[None, :],
            mask=(lines < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + columns[None, :] * INPUTS + (start + depth)[:, None],
            mask=(columns < OUTPUTS)[None, :] & inside[:, None],
            other=0.0,
        )
        if SCALED:
            right = widened(right, left, BITS)
        if GROUP > 0:
            scale = tl.load(own + start // GROUP, mask=columns < OUTPUTS, other=0.0)
            sums += tl.dot(left, right, input_precision=EXACT) * scale[None, :]
        else:
            sums = tl.dot(left, right, sums, input_precision=EXACT)
    if SCALED and GROUP == 0:
        sums *= tl.load(own, mask=columns < OUTPUTS, other=0.0)[None, :]
    if BIAS:
        added = tl.load(bias + columns, mask=columns < OUTPUTS, other=0.0)
        sums += added.to(tl.float32)[None, :]
    mask = (lines < rows)[:, None] & (columns < OUTPUTS)[None, :]
    tl.store(output + lines[:, None] * OUTPUTS + columns[None, :], sums, mask=mask)
