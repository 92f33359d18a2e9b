"""A matrix product of few rows that is as fast as its weights can be read. Each weight is read
once, in wide asynchronous copies, several groups of which are in flight.

The weights are the left factor, so tensor cores multiply 32 to 128 outputs by as few as 16 rows. If
outputs make too few programs, the inputs are split into parts (split K), and the last program of a
tile to arrive adds them: always in the order of the parts.
"""

import triton.language as tl

from .fused_norm import divide_by_rms, load_residual, load_squares, output_places, store_with_norm
from .jit import await_earlier, jit, jit_unspecialized, prefetch_rows


@jit
def add_bias(
    sums: tl.tensor,
    bias: tl.tensor,
    columns: tl.tensor,
    BIAS: tl.constexpr,
) -> tl.tensor:
    if BIAS:
        sums += tl.load(bias + columns).to(tl.float32)[:, None]
    return sums


@jit
def store_outputs(
    output: tl.tensor,
    sums: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Writes sums [COLUMNS, ROWS] to output [rows, outputs]."""
    places, mask = output_places(tile, rows, outputs, ROWS, COLUMNS)
    tl.store(output + places, sums, mask=mask)


@jit
def sum_splits(
    partial: tl.tensor,
    arrived: tl.tensor,
    sums: tl.tensor,
    tile: tl.tensor,
    splits: tl.tensor,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """(whether this program is the last of its tile; if so, the sum of all parts in their order).

    A program's part is its id of axis 1. Without SPLIT each is the last, of one.
    """
    last = True
    if SPLIT:
        places = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        own = partial + tile.to(tl.int64) * splits * COLUMNS * ROWS + places
        tl.store(own + tl.program_id(1) * COLUMNS * ROWS, sums)
        # Barriers: all threads' parts are written before the counter, and read after it.
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if last:
            sums = tl.zeros([COLUMNS, ROWS], tl.float32)
            for part in range(0, splits):
                sums += tl.load(own + part * COLUMNS * ROWS, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    return last, sums


@jit_unspecialized("rows", "splits", "ahead")
def small_batch_kernel(
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
    after. With DEPENDENT `ahead` bytes of each output's weights are prefetched first, with LINES as
    in prefetch_rows. With PARTS the rows are not yet divided by the root mean square, which
    `squares` and `eps` give; with ADD the residual is added and the product's part of a norm is
    computed, which writes `squares` (fused_norm).
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
    left = begins[:, None] + depth[None, :]
    right = x + lines.to(tl.int64)[None, :] * x_stride + depth[:, None]
    found = load_squares(squares, lines, PARTS, ROOM)
    before, factor = load_residual(residual, norm, tile, rows, outputs, ADD, ROWS, COLUMNS)
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(first, first + share, DEPTH):
        sums = tl.dot(tl.load(left + start), tl.load(right + start), sums)
    last, sums = sum_splits(partial, arrived, sums, tile, splits, SPLIT, ROWS, COLUMNS)
    if last:
        sums = add_bias(divide_by_rms(sums, found, inputs, eps, PARTS), bias, columns, BIAS)
        if ADD:
            store_with_norm(
                output, residual, squares, sums, before, factor, tile, rows, outputs, ROWS, COLUMNS
            )
        else:
            store_outputs(output, sums, tile, rows, outputs, ROWS, COLUMNS)


@jit_unspecialized("rows", "ahead")
def small_batch_silu_kernel(
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
    """Program (tile of outputs): silu(x . gate^T) * (x . up^T), rounded in between like a separate
    product and activation. The weight's first `outputs` rows are the gate's.

    `inputs` is a multiple of DEPTH, and rows are at most ROWS; `ahead`, `squares` and PARTS as in
    small_batch_kernel.
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
    gate = divide_by_rms(gate, found, inputs, eps, PARTS)
    up = divide_by_rms(up, found, inputs, eps, PARTS)
    kind = x.dtype.element_ty
    wide = add_bias(gate, bias, columns, BIAS).to(kind).to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(kind).to(tl.float32)
    other = add_bias(up, bias, columns + outputs, BIAS).to(kind).to(tl.float32)
    store_outputs(output, silu * other, tile, rows, outputs, ROWS, COLUMNS)
