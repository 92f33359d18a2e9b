"""PTX that converts two integers of each 16-bit word to floats, two words at a time.

The bits of a number become the last bits of a float whose last bit counts 1: 128 in bfloat16, 1024
in float16. An exact addition then subtracts that float and the zero point, as all are integers.
Triton's compiler converts one number at a time, with half as many instructions again.
"""

import triton.language as tl

CONSTRAINTS = tl.constexpr("=&r,=&r,r,r,r")

_NIBBLES = """
{
.reg .b32 low, high, one;
mov.b32 one, ONES;
shr.u32 low, $2, FIRST;
shr.u32 high, $2, SECOND;
lop3.b32 $0, low, 0x000f000f, BASE, 0xea;
lop3.b32 $1, high, 0x000f000f, BASE, 0xea;
fma.rn.KIND $0, $0, one, $3;
fma.rn.KIND $1, $1, one, $4;
}
"""
_BFLOAT16 = (("ONES", "0x3f803f80"), ("BASE", "0x43004300"), ("KIND", "bf16x2"))
_FLOAT16 = (("ONES", "0x3c003c00"), ("BASE", "0x64006400"), ("KIND", "f16x2"))
_EARLY, _LATE = (("FIRST", "0"), ("SECOND", "4")), (("FIRST", "8"), ("SECOND", "12"))


# The bits of a 4-bit float (sign, two exponent bits, one mantissa bit) are put into a larger float,
# which has a larger exponent bias: the result is 2^126 times too small in bfloat16, 2^14 in
# float16.
_FLOATS = """
{
.reg .b32 low, high, sign, unit;
mov.b32 unit, UNIT;
shr.u32 low, $2, FIRST;
shr.u32 high, $2, SECOND;
shl.b32 sign, low, 12;
shl.b32 low, low, PLACE;
and.b32 low, low, BITS;
lop3.b32 $0, sign, 0x80008000, low, 0xea;
shl.b32 sign, high, 12;
shl.b32 high, high, PLACE;
and.b32 high, high, BITS;
lop3.b32 $1, sign, 0x80008000, high, 0xea;
fma.rn.KIND $0, $0, unit, $3;
fma.rn.KIND $1, $1, unit, $4;
}
"""
_BFLOAT16_UNIT = (("UNIT", "0x7e807e80"), ("PLACE", "6"), ("BITS", "0x01c001c0"), _BFLOAT16[-1])
_FLOAT16_UNIT = (("UNIT", "0x74007400"), ("PLACE", "9"), ("BITS", "0x0e000e00"), _FLOAT16[-1])


def _filled(*parts: tuple[str, str], text: str = _NIBBLES) -> str:
    for name, value in parts:
        text = text.replace(name, value)
    return text


# The first two of four numbers, and the last two.
EARLY_BFLOAT16 = tl.constexpr(_filled(*_BFLOAT16, *_EARLY))
LATE_BFLOAT16 = tl.constexpr(_filled(*_BFLOAT16, *_LATE))
EARLY_FLOAT16 = tl.constexpr(_filled(*_FLOAT16, *_EARLY))
LATE_FLOAT16 = tl.constexpr(_filled(*_FLOAT16, *_LATE))
FLOATS_EARLY_BFLOAT16 = tl.constexpr(_filled(*_BFLOAT16_UNIT, *_EARLY, text=_FLOATS))
FLOATS_LATE_BFLOAT16 = tl.constexpr(_filled(*_BFLOAT16_UNIT, *_LATE, text=_FLOATS))
FLOATS_EARLY_FLOAT16 = tl.constexpr(_filled(*_FLOAT16_UNIT, *_EARLY, text=_FLOATS))
FLOATS_LATE_FLOAT16 = tl.constexpr(_filled(*_FLOAT16_UNIT, *_LATE, text=_FLOATS))
# For 8-bit numbers, of which a word has two: both at once.
BYTES_FLOAT16 = tl.constexpr(
    """
{
.reg .b32 high, one;
mov.b32 one, 0x3c003c00;
shr.u32 high, $2, 8;
lop3.b32 $0, $2, 0x00ff00ff, 0x64006400, 0xea;
lop3.b32 $1, high, 0x00ff00ff, 0x64006400, 0xea;
fma.rn.f16x2 $0, $0, one, $3;
fma.rn.f16x2 $1, $1, one, $4;
}
"""
)
# 8 bits do not fit after 128 in bfloat16, but after 2^23 in float32; minus 128 + 2^23 they are
# numbers that the upper half of a float32, a bfloat16, represents.
BYTES_BFLOAT16 = tl.constexpr(
    """
{
.reg .b32 a, b, c, d, magic, one;
mov.b32 magic, 0x4b000000;
mov.b32 one, 0x3f803f80;
prmt.b32 a, $2, magic, 0x7440;
prmt.b32 b, $2, magic, 0x7441;
prmt.b32 c, $2, magic, 0x7442;
prmt.b32 d, $2, magic, 0x7443;
add.rn.f32 a, a, 0fCB000080;
add.rn.f32 b, b, 0fCB000080;
add.rn.f32 c, c, 0fCB000080;
add.rn.f32 d, d, 0fCB000080;
prmt.b32 $0, a, c, 0x7632;
prmt.b32 $1, b, d, 0x7632;
fma.rn.bf16x2 $0, $0, one, $3;
fma.rn.bf16x2 $1, $1, one, $4;
}
"""
)
