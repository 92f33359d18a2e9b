"""A linear layer whose sums are taken in one order for any number of rows.

cuBLAS chooses tiles and cuts of the inner dimension by the number of rows, so that a row's last
bits depend on how many others there are. Here one tile serves all, and nothing is cut: as in batch
invariant kernels (He et al., "Defeating Nondeterminism in LLM Inference", 2025).
"""

import triton.language as tl

from .jit import jit_unspecialized


@jit_unspecialized("rows")
def linear_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Program (tile of rows, tile of outputs): output [T, OUTPUTS] = x . weight^T (+ bias).

    Tiles of rows are next to each other in the order of programs: they share a tile of weights.
    """
    tiles = tl.cdiv(rows, ROWS)
    lines = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) // tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
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
        sums = tl.dot(left, right, sums, input_precision=EXACT)
    if BIAS:
        added = tl.load(bias + columns, mask=columns < OUTPUTS, other=0.0)
        sums += added.to(tl.float32)[None, :]
    mask = (lines < rows)[:, None] & (columns < OUTPUTS)[None, :]
    tl.store(output + lines[:, None] * OUTPUTS + columns[None, :], sums, mask=mask)
