"""8-bit floats: rounded and widened by the device's conversions, or e4m3 by its bits (BITS), and
products with weights of them.

GPUs have no instruction for e4m3 before Ada (sm_89), and Triton then no type for it: such tensors
are passed as bytes.
"""

import triton.language as tl

from .jit import jit, jit_unspecialized


@jit
def widened(raw: tl.tensor, like: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """What a cache or a matrix holds, in the dtype of `like`."""
    if BITS:
        # As float16, whose exponents have another bias: 2^-8 of the number, also of subnormals.
        bits = raw.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        number = half.to(tl.float16, bitcast=True)
        if like.dtype != tl.float16:
            number = number.to(tl.float32)
        made = tl.where((bits & 0x7F) == 0x7F, float("nan"), number * 256.0).to(like.dtype)
    else:
        made = raw.to(like.dtype)
    return made


@jit
def exact_half(tile: tl.tensor) -> tl.tensor:
    """(tile in float16, unit [rows]): numbers of up to 11 bits, as bfloat16's, times a power of two
    for each row, as which they are what they were, but for what is 2^28 times smaller than a row's
    largest. The hardware makes float16 out of 8-bit floats, and nothing else, in one instruction.
    """
    wide = tile.to(tl.float32)
    bits = tl.max(tl.abs(wide), 1).to(tl.uint32, bitcast=True) & 0x7F800000
    power = tl.maximum(bits.to(tl.float32, bitcast=True), 7.888609052210118e-31)  # 2^-100
    return (wide * (16384.0 / power)[:, None]).to(tl.float16), power / 16384.0


@jit
def narrowed(
    x: tl.tensor,
    inverse_scale: tl.tensor,
    to: tl.tensor,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
) -> tl.tensor:
    """x in the dtype that the pointer `to` points to; with LARGEST above 0 it is times
    inverse_scale and within what that dtype can hold, NaN staying NaN."""
    wide = x.to(tl.float32)
    if LARGEST > 0.0:
        wide = wide * inverse_scale
        wide = tl.where(wide > LARGEST, LARGEST, tl.where(wide < -LARGEST, -LARGEST, wide))
    if BITS:
        made = _e4m3_bits(wide)
    else:
        made = wide.to(to.dtype.element_ty)
    return made


@jit
def _e4m3_bits(x: tl.tensor) -> tl.tensor:
    """uint8: the nearest e4m3 number to x within [-448, 448], halves to even; 0x7f for NaN."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # The sum's last bit is 2^-9, what subnormals are counted in.
    counted = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, counted, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return tl.where(x != x, 0x7F, code | sign).to(tl.uint8)


@jit
def round_rows_kernel(
    output: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    x_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> None:
    """Program (row): output [T, WIDTH] in 8-bit floats, and what they are to be multiplied with."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    wide = tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), SMALLEST) / LARGEST
    made = narrowed(wide, 1.0 / scale, output, False, LARGEST)
    tl.store(output + row * WIDTH + at, made, mask=mask)
    tl.store(scales + row, scale)


@jit_unspecialized("rows")
def float8_linear_kernel(
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
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Program (tile of rows, tile of outputs): output [T, OUTPUTS] = x . weight^T (+ bias).

    weight [OUTPUTS, INPUTS] times scales [OUTPUTS, groups of GROUP inputs]; with GROUP 0 there is
    one for each output. GROUP is a multiple of DEPTH. Tiles of rows are next to each other in the
    order of programs: they share a tile of weights.
    """
    tiles = tl.cdiv(rows, ROWS)
    lines = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) // tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
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
        right = widened(right, left, BITS)
        if GROUP > 0:
            scale = tl.load(own + start // GROUP, mask=columns < OUTPUTS, other=0.0)
            sums += tl.dot(left, right, input_precision=EXACT) * scale[None, :]
        else:
            sums = tl.dot(left, right, sums, input_precision=EXACT)
    if GROUP == 0:
        sums *= tl.load(own, mask=columns < OUTPUTS, other=0.0)[None, :]
    if BIAS:
        added = tl.load(bias + columns, mask=columns < OUTPUTS, other=0.0)
        sums += added.to(tl.float32)[None, :]
    mask = (lines < rows)[:, None] & (columns < OUTPUTS)[None, :]
    tl.store(output + lines[:, None] * OUTPUTS + columns[None, :], sums, mask=mask)
