"""A product of few rows, which is as fast as its weights can be read: each is read once, in wide
copies of which several groups are under way.

The weights are the left factor, so that tensor cores take 32 to 128 outputs by as few as 16 rows.
Where outputs do not make enough programs, the inputs are cut into parts (split K), and the last
program of a tile adds them up: in the order of the parts, whichever program is the last.
"""

import triton.language as tl

from .fused_norm import divided, keep_added, load_residual, load_squares, outputs_of
from .jit import await_earlier, jit, jit_unspecialized, prefetch_rows


@jit
def biased(
    sums: tl.tensor,
    bias: tl.tensor,
    columns: tl.tensor,
    BIAS: tl.constexpr,
) -> tl.tensor:
    if BIAS:
        sums += tl.load(bias + columns).to(tl.float32)[:, None]
    return sums


@jit
def keep(
    output: tl.tensor,
    sums: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Writes sums [COLUMNS, ROWS] to output [rows, outputs]."""
    places, mask = outputs_of(tile, rows, outputs, ROWS, COLUMNS)
    tl.store(output + places, sums, mask=mask)


@jit
def joined(
    partial: tl.tensor,
    arrived: tl.tensor,
    sums: tl.tensor,
    tile: tl.tensor,
    splits: tl.tensor,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """(whether this program is the last of its tile's; if so, the sum of all parts in their order).

    A program's part is its id of axis 1. Without SPLIT each is the last, of one.
    """
    last = True
    if SPLIT:
        places = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        own = partial + tile.to(tl.int64) * splits * COLUMNS * ROWS + places
        tl.store(own + tl.program_id(1) * COLUMNS * ROWS, sums)
        # All threads' parts are written before it is said that they are, and read behind it.
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if last:
            sums = tl.zeros([COLUMNS, ROWS], tl.float32)
            for part in range(0, splits):
                sums += tl.load(own + part * COLUMNS * ROWS, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    return last, sums


@jit_unspecialized("rows", "splits", "ahead")
def skinny_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    x_stride: tl.tensor,
    ahead: tl.tensor,
    residual: tl.tensor,
    norm: tl.tensor,
    squares: tl.tensor,
    eps: tl.tensor,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LINES: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
) -> None:
    """Program (tile of outputs, part): output [rows, outputs] = x . weight^T (+ bias).

    `inputs` is a multiple of splits * DEPTH, and rows are at most ROWS. With SPLIT, `partial`
    float32 holds [tiles, splits, COLUMNS, ROWS] and `arrived` int32 [tiles], zeros before and
    after. With DEPENDENT `ahead` bytes of each output's weights are asked for before all else,
    with LINES as of prefetch_rows. With PARTS the rows are still to be divided, by what `squares`
    and `eps` say; with ADD the residual is added and the product's part of a norm is done, of which
    `squares` are a result (fused_norm).
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
    left = begins[:, None] + depth[None, :]
    right = x + lines.to(tl.int64)[None, :] * x_stride + depth[:, None]
    found = load_squares(squares, lines, PARTS, ROOM)
    before, factor = load_residual(residual, norm, tile, rows, outputs, ADD, ROWS, COLUMNS)
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(first, first + share, DEPTH):
        sums = tl.dot(tl.load(left + start), tl.load(right + start), sums)
    last, sums = joined(partial, arrived, sums, tile, splits, SPLIT, ROWS, COLUMNS)
    if last:
        sums = biased(divided(sums, found, inputs, eps, PARTS), bias, columns, BIAS)
        if ADD:
            keep_added(
                output, residual, squares, sums, before, factor, tile, rows, outputs, ROWS, COLUMNS
            )
        else:
            keep(output, sums, tile, rows, outputs, ROWS, COLUMNS)


@jit_unspecialized("rows", "ahead")
def skinny_silu_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    x_stride: tl.tensor,
    ahead: tl.tensor,
    squares: tl.tensor,
    eps: tl.tensor,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
) -> None:
    """Program (tile of outputs): silu(x . gate^T) * (x . up^T), rounded in between as the product
    and the activation are where they are apart. The weight's first `outputs` rows are the gate's.

    `inputs` is a multiple of DEPTH, and rows are at most ROWS; `ahead`, `squares` and PARTS
    as of skinny_kernel.
    """
    tile = tl.program_id(0)
    columns = tl.minimum(tile * COLUMNS + tl.arange(0, COLUMNS), outputs - 1)
    lines = tl.minimum(tl.arange(0, ROWS), rows - 1)
    depth = tl.arange(0, DEPTH)
    begins = weight + columns.to(tl.int64) * inputs
    between = outputs.to(tl.int64) * inputs
    if DEPENDENT > 0:
        prefetch_rows(begins, ahead, LINES)
        prefetch_rows(begins + between, ahead, LINES)
    await_earlier(DEPENDENT)
    gates = begins[:, None] + depth[None, :]
    ups = gates + between
    right = x + lines.to(tl.int64)[None, :] * x_stride + depth[:, None]
    found = load_squares(squares, lines, PARTS, ROOM)
    gate = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, inputs, DEPTH):
        taken = tl.load(right + start)
        gate = tl.dot(tl.load(gates + start), taken, gate)
        up = tl.dot(tl.load(ups + start), taken, up)
    gate = divided(gate, found, inputs, eps, PARTS)
    up = divided(up, found, inputs, eps, PARTS)
    kind = x.dtype.element_ty
    wide = biased(gate, bias, columns, BIAS).to(kind).to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(kind).to(tl.float32)
    other = biased(up, bias, columns + outputs, BIAS).to(kind).to(tl.float32)
    keep(output, silu * other, tile, rows, outputs, ROWS, COLUMNS)
