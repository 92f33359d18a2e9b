"""A product of one row with 4-bit weights, without tensor cores; see `vector_product`.

Four bits become the highest or the middle bits of a float's mantissa: 1 + number * 2^-7 or 2^-11.
x is multiplied by 2^7 or 2^11, and what the ones add is subtracted. This takes three instructions a
weight; a conversion of integers would take several times as long as the reading.
"""

import triton.language as tl

from .jit import await_earlier, jit
from .packed_launch import READ

_READ = tl.constexpr(READ)
# The numbers of the first and the third run of a word, and those of the others.
_HIGH, _MIDDLE = tl.constexpr(2.0**-7), tl.constexpr(2.0**-11)
# Of two words, in one register: the lowest four bits of each, then the next four.
_ASSEMBLY = tl.constexpr(
    """
{
.reg .b32 a, b, c, d;
shl.b32 a, $8, 16;
shl.b32 b, $8, 8;
shr.u32 c, $8, 8;
shr.u32 d, $8, 16;
lop3.b32 $0, a, 0x000f0000, 0x3f800000, 0xea;
lop3.b32 $1, $8, 0x000f0000, 0x3f800000, 0xea;
lop3.b32 $2, b, 0x0000f000, 0x3f800000, 0xea;
lop3.b32 $3, c, 0x0000f000, 0x3f800000, 0xea;
lop3.b32 $4, b, 0x000f0000, 0x3f800000, 0xea;
lop3.b32 $5, c, 0x000f0000, 0x3f800000, 0xea;
lop3.b32 $6, $8, 0x0000f000, 0x3f800000, 0xea;
lop3.b32 $7, d, 0x0000f000, 0x3f800000, 0xea;
}
"""
)
_CONSTRAINTS = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r")


@jit
def _runs(words: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """The four runs: 1 + number * _HIGH, _MIDDLE, _HIGH, _MIDDLE."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _ASSEMBLY, _CONSTRAINTS, [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        wide = words.to(tl.int32)
        a = 1.0 + (wide & 15).to(tl.float32) * _HIGH
        b = 1.0 + (wide >> 4 & 15).to(tl.float32) * _MIDDLE
        c = 1.0 + (wide >> 8 & 15).to(tl.float32) * _HIGH
        d = 1.0 + (wide >> 12 & 15).to(tl.float32) * _MIDDLE
    return a, b, c, d


@jit
def _multiplied(
    high: tl.tensor,
    middle: tl.tensor,
    x: tl.tensor,
    other: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    group: tl.tensor,
    outputs: tl.tensor,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
) -> tl.tensor:
    """Two runs [COLUMNS, STEPS, RUN] times x and other [STEPS, RUN], with the scales and the zero
    points of their `group` [STEPS]. `scales` and `zeros` [COLUMNS, 1] point to the first group."""
    early, late = x / _HIGH, other / _MIDDLE
    places = (group * outputs)[None, :]
    if ZERO == _READ:
        zero = tl.load(zeros + places).to(tl.float32)[:, :, None]
        without = (early + late)[None, :, :] + zero * (x + other)[None, :, :]
    else:
        without = (early + late + ZERO * (x + other))[None, :, :]
    made = high * early[None, :, :] + (middle * late[None, :, :] - without)
    if GROUP > 0:
        made *= tl.load(scales + places).to(tl.float32)[:, :, None]
    return made


@jit
def packed_vector_kernel(
    output: tl.tensor,
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    steps: tl.tensor,
    outputs: tl.tensor,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    RUN: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile of outputs): output [outputs] = x . weight^T (+ bias).

    words int16 [steps, outputs, RUN], each step four runs of RUN inputs; scales, and uint8 zeros if
    ZERO is READ, [groups, outputs] of GROUP inputs, a multiple of two runs; GROUP 0 means one
    group. PARTS times STEPS are at least `steps`. No step writes weights, so the first part is read
    before earlier kernels have ended.
    """
    tile = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Beyond the last output or step, the last is read instead.
    columns = tl.minimum(tile, outputs - 1)
    places, depth = tl.arange(0, STEPS), tl.arange(0, RUN)
    own = words + columns[:, None, None] * RUN + depth[None, None, :]
    raw = tl.load(own + tl.minimum(places, steps - 1).to(tl.int64)[None, :, None] * outputs * RUN)
    await_earlier(DEPENDENT)
    sums = tl.zeros([COLUMNS, STEPS, RUN], tl.float32)
    for part in tl.static_range(PARTS):
        wanted = part * STEPS + places
        step = tl.minimum(wanted, steps - 1)
        if part > 0:
            raw = tl.load(own + step.to(tl.int64)[None, :, None] * outputs * RUN)
        given = x + (step * (4 * RUN))[:, None] + depth[None, :]
        inside = (wanted < steps)[:, None]
        x_a = tl.load(given, mask=inside, other=0.0).to(tl.float32)
        x_b = tl.load(given + RUN, mask=inside, other=0.0).to(tl.float32)
        x_c = tl.load(given + 2 * RUN, mask=inside, other=0.0).to(tl.float32)
        x_d = tl.load(given + 3 * RUN, mask=inside, other=0.0).to(tl.float32)
        a, b, c, d = _runs(raw, ASM)
        early, late = step * 0, step * 0
        if GROUP > 0:
            early, late = step * (4 * RUN) // GROUP, (step * (4 * RUN) + 2 * RUN) // GROUP
        sums += _multiplied(
            a, b, x_a, x_b, scales + columns[:, None], zeros + columns[:, None], early, outputs,
            GROUP, ZERO,
        )  # fmt: skip
        sums += _multiplied(
            c, d, x_c, x_d, scales + columns[:, None], zeros + columns[:, None], late, outputs,
            GROUP, ZERO,
        )  # fmt: skip
    found = tl.sum(tl.sum(sums, 2), 1)
    if GROUP == 0:
        found *= tl.load(scales + columns).to(tl.float32)
    if BIAS:
        found += tl.load(bias + columns).to(tl.float32)
    tl.store(output + tile, found, mask=tile < outputs)
