"""An RMS norm fused into two products: the first adds to the residual, multiplies by the norm's
weights and sums squares; the second divides its sums by the root mean square.

The products' kernels call this. The data that they need after a product's
loop is loaded before it, so that nothing waits for it.
"""

import triton.language as tl

from .jit import jit


@jit
def load_squares(
    squares: tl.tensor, lines: tl.tensor, PARTS: tl.constexpr, ROOM: tl.constexpr
) -> tl.tensor:
    """[lines, ROOM] of squares [rows, PARTS]; PARTS 0 means that nothing is to be divided."""
    found = 0.0
    if PARTS > 0:
        parts = tl.arange(0, ROOM)
        mask = (parts < PARTS)[None, :]
        found = tl.load(squares + lines[:, None] * PARTS + parts[None, :], mask=mask, other=0.0)
    return found


@jit
def divide_by_rms(
    sums: tl.tensor, squares: tl.tensor, inputs: tl.tensor, eps: tl.tensor, PARTS: tl.constexpr
) -> tl.tensor:
    """Divides sums [COLUMNS, ROWS] by the root mean squares of their rows."""
    if PARTS > 0:
        sums *= tl.rsqrt(tl.sum(squares, 1) / inputs + eps)[None, :]
    return sums


@jit
def output_places(
    tile: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """(places [COLUMNS, ROWS] of a tile in [rows, outputs], mask of those that exist)."""
    lines = tl.arange(0, ROWS)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    places = lines.to(tl.int64)[None, :] * outputs + columns[:, None]
    return places, (columns < outputs)[:, None] & (lines < rows)[None, :]


@jit
def load_residual(
    residual: tl.tensor,
    norm: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """(residual [COLUMNS, ROWS], weights of the norm [COLUMNS])."""
    before, factor = 0.0, 0.0
    if ADD:
        places, mask = output_places(tile, rows, outputs, ROWS, COLUMNS)
        before = tl.load(residual + places, mask=mask, other=0.0)
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        factor = tl.load(norm + columns, mask=columns < outputs, other=0.0)
    return before, factor


@jit
def store_with_norm(
    output: tl.tensor,
    residual: tl.tensor,
    squares: tl.tensor,
    sums: tl.tensor,
    before: tl.tensor,
    factor: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Adds sums [COLUMNS, ROWS] to the residual, rounded like a separate product and norm; writes
    the total's part of `squares` [rows, tiles], and the total times the norm's weights."""
    kind = output.dtype.element_ty
    places, mask = output_places(tile, rows, outputs, ROWS, COLUMNS)
    total = (sums.to(kind).to(tl.float32) + before.to(tl.float32)).to(kind)
    wide = tl.where(mask, total.to(tl.float32), 0.0)
    tl.store(residual + places, total, mask=mask)
    tl.store(output + places, wide * factor.to(tl.float32)[:, None], mask=mask)
    lines = tl.arange(0, ROWS)
    own = squares + lines * tl.num_programs(0) + tile
    tl.store(own, tl.sum(wide * wide, 0), mask=lines < rows)
