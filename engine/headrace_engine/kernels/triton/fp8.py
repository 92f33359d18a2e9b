"""Rounding and conversion of 8-bit floats: by the device's instructions or, with BITS, of e4m3 by
integer arithmetic.

GPUs before Ada (sm_89) have no instruction for e4m3, and Triton has no type for it there: such
tensors are passed as bytes.
"""

import triton.language as tl

from .jit import jit


@jit
def widened(raw: tl.tensor, like: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Converts stored 8-bit floats to the dtype of `like`."""
    if BITS:
        # First as float16, whose exponent bias differs: 2^-8 of the number, also for subnormals.
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
    """Returns the tile in float16, scaled by a power of two for each row, and these units [rows].

    Numbers of up to 11 bits, like bfloat16's, stay exact, unless they are 2^28 times smaller than
    the row's largest. float16 is the only type to which the hardware converts 8-bit floats in one
    instruction.
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
    """Converts x to the dtype that the pointer `to` points to; LARGEST above 0 means times
    inverse_scale and clamped to that dtype's range; NaN stays NaN."""
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
    # The sum's last bit is 2^-9, the unit of subnormals.
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
    """Program (row): rounds to output [T, WIDTH] in 8-bit floats, and writes their scales."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    wide = tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), SMALLEST) / LARGEST
    made = narrowed(wide, 1.0 / scale, output, False, LARGEST)
    tl.store(output + row * WIDTH + at, made, mask=mask)
    tl.store(scales + row, scale)
