"""Products with packed int4 or int8 weights, which are converted to floats between memory and the
tensor cores.

A word of 16 bits holds one number of each of several runs of inputs (4 runs of 4 bits, 2 of 8). So
a tile of words is a tile of each run, in the layout of tensor cores: no data moves between threads.
For few rows, reading and converting the weights bounds the speed. The weights are then the left
factor, as in `small_batch_gemm`, and inputs are split into parts if outputs make too few programs.
"""

import triton.language as tl

from .jit import await_earlier, jit, jit_unspecialized
from .packed_assembly import (
    BYTES_BFLOAT16,
    BYTES_FLOAT16,
    CONSTRAINTS,
    EARLY_BFLOAT16,
    EARLY_FLOAT16,
    FLOATS_EARLY_BFLOAT16,
    FLOATS_EARLY_FLOAT16,
    FLOATS_LATE_BFLOAT16,
    FLOATS_LATE_FLOAT16,
    LATE_BFLOAT16,
    LATE_FLOAT16,
)
from .packed_launch import E2M1
from .small_batch_gemm import sum_splits

_E2M1 = tl.constexpr(E2M1)


@jit
def _run(words: tl.tensor, zeros: tl.tensor, FIRST: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """float32: the numbers from bit FIRST on, minus their zero points."""
    values = (words.to(tl.int32) >> FIRST) & ((1 << BITS) - 1)
    return values.to(tl.float32) - zeros


@jit
def _bfloat16_pair(
    words: tl.tensor, added: tl.tensor, other: tl.tensor, CODE: tl.constexpr
) -> tl.tensor:
    kind: tl.constexpr = tl.bfloat16
    return tl.inline_asm_elementwise(
        CODE, CONSTRAINTS, [words, added.to(kind), other.to(kind)],
        dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@jit
def _float16_pair(
    words: tl.tensor, added: tl.tensor, other: tl.tensor, CODE: tl.constexpr
) -> tl.tensor:
    kind: tl.constexpr = tl.float16
    return tl.inline_asm_elementwise(
        CODE, CONSTRAINTS, [words, added.to(kind), other.to(kind)],
        dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@jit
def _float_run(words: tl.tensor, FIRST: tl.constexpr) -> tl.tensor:
    """float32: the 4-bit floats from bit FIRST on. Doubled, they are integers: the largest of three
    linear functions of the code without its sign."""
    code = words.to(tl.int32) >> FIRST
    size = code & 7
    doubled = tl.maximum(tl.maximum(size, 2 * size - 4), 4 * size - 16).to(tl.float32)
    return tl.where((code & 8) > 0, -0.5, 0.5) * doubled


@jit
def _widened_floats(
    words: tl.tensor, KIND: tl.constexpr, FIRST: tl.constexpr, ASM: tl.constexpr
) -> tl.tensor:
    """Two runs of 4-bit floats from bit FIRST on, as KIND."""
    none = tl.zeros([words.shape[0], 1], tl.float32)
    if not ASM:
        a = _float_run(words, FIRST).to(KIND)
        b = _float_run(words, FIRST + 4).to(KIND)
    elif KIND == tl.bfloat16:
        if FIRST == 0:
            a, b = _bfloat16_pair(words, none, none, FLOATS_EARLY_BFLOAT16)
        else:
            a, b = _bfloat16_pair(words, none, none, FLOATS_LATE_BFLOAT16)
    elif FIRST == 0:
        a, b = _float16_pair(words, none, none, FLOATS_EARLY_FLOAT16)
    else:
        a, b = _float16_pair(words, none, none, FLOATS_LATE_FLOAT16)
    return a, b


@jit
def _widened(
    words: tl.tensor,
    zeros: tl.tensor,
    others: tl.tensor,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """Two runs from bit FIRST on, minus their zero points (float32 [COLUMNS, 1]), as KIND."""
    if not ASM:
        a = _run(words, zeros, FIRST, BITS).to(KIND)
        b = _run(words, others, FIRST + BITS, BITS).to(KIND)
    elif KIND == tl.bfloat16:
        if BITS == 8:
            a, b = _bfloat16_pair(words, 128.0 - zeros, 128.0 - others, BYTES_BFLOAT16)
        elif FIRST == 0:
            a, b = _bfloat16_pair(words, -128.0 - zeros, -128.0 - others, EARLY_BFLOAT16)
        else:
            a, b = _bfloat16_pair(words, -128.0 - zeros, -128.0 - others, LATE_BFLOAT16)
    elif BITS == 8:
        a, b = _float16_pair(words, -1024.0 - zeros, -1024.0 - others, BYTES_FLOAT16)
    elif FIRST == 0:
        a, b = _float16_pair(words, -1024.0 - zeros, -1024.0 - others, EARLY_FLOAT16)
    else:
        a, b = _float16_pair(words, -1024.0 - zeros, -1024.0 - others, LATE_FLOAT16)
    return a, b


@jit
def _zero_points(
    zeros: tl.tensor,
    first: tl.tensor,
    outputs: tl.tensor,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """float32 [COLUMNS, 1]: zero points of the group that contains input `first`; ZERO is the one
    of all, or READ."""
    if ZERO >= 0:
        found = tl.full([COLUMNS, 1], ZERO, tl.float32)
    else:
        group = first // GROUP if GROUP > 0 else first * 0
        found = tl.load(zeros + group * outputs).to(tl.float32)[:, None]
    return found


@jit
def multiply_packed(
    sums: tl.tensor,
    words: tl.tensor,
    x_a: tl.tensor,
    x_b: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    first: tl.tensor,
    outputs: tl.tensor,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    RUN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASM: tl.constexpr,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """sums [COLUMNS, ROWS] + two runs of words [COLUMNS, RUN] times x_a and x_b [RUN, ROWS], times
    the scales of the runs' groups (GROUP 0: without scales). The runs begin at bit FIRST; the first
    run begins with input `first`. `scales` and `zeros` point to the first group; the next groups
    follow at distances of `outputs`."""
    if ZERO == _E2M1:
        a, b = _widened_floats(words, x_a.dtype, FIRST, ASM)
    else:
        zero = _zero_points(zeros, first, outputs, GROUP, ZERO, COLUMNS)
        other = _zero_points(zeros, first + RUN, outputs, GROUP, ZERO, COLUMNS)
        a, b = _widened(words, zero, other, x_a.dtype, FIRST, BITS, ASM)
    if GROUP == 0:
        sums = tl.dot(a, x_a, sums, input_precision=EXACT)
        sums = tl.dot(b, x_b, sums, input_precision=EXACT)
    elif GROUP % (2 * RUN) == 0:
        scale = tl.load(scales + first // GROUP * outputs).to(tl.float32)
        part = tl.dot(a, x_a, input_precision=EXACT)
        sums += tl.dot(b, x_b, part, input_precision=EXACT) * scale[:, None]
    else:
        early = tl.load(scales + first // GROUP * outputs).to(tl.float32)
        late = tl.load(scales + (first + RUN) // GROUP * outputs).to(tl.float32)
        sums += tl.dot(a, x_a, input_precision=EXACT) * early[:, None]
        sums += tl.dot(b, x_b, input_precision=EXACT) * late[:, None]
    return sums


@jit
def _keep(
    output: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    columns: tl.tensor,
    lines: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    """Writes sums [COLUMNS, ROWS], times the scale if all inputs share one, to output's rows."""
    inside = columns < outputs
    if GROUP == 0:
        sums *= tl.load(scales + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        sums += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    to = output + lines.to(tl.int64)[None, :] * outputs + columns[:, None]
    tl.store(to, sums, mask=inside[:, None] & (lines < rows)[None, :])


@jit_unspecialized("rows", "splits")
def packed_linear_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    steps: tl.tensor,
    outputs: tl.tensor,
    x_stride: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    RUN: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASM: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile of rows and of outputs; part): output [rows, outputs] = x . weight^T (+ bias).

    words int16 [steps, outputs, RUN], each step 16 / BITS runs of RUN inputs; scales, and uint8
    zeros if ZERO is READ, [groups of GROUP inputs, outputs]; GROUP 0 means one group. With SPLIT,
    `partial` float32 holds [programs, splits, COLUMNS, ROWS] and `arrived` int32 [programs], zeros
    before and after; the last program to arrive adds the parts in their order.
    """
    await_earlier(DEPENDENT)
    tiles = tl.cdiv(rows, ROWS)
    tile, part = tl.program_id(0), tl.program_id(1)
    lines = tile % tiles * ROWS + tl.arange(0, ROWS)
    columns = tile // tiles * COLUMNS + tl.arange(0, COLUMNS)
    # Beyond the last output or row, the last is read instead, and nothing is written.
    held = tl.minimum(columns, outputs - 1)
    depth = tl.arange(0, RUN)
    left = words + held.to(tl.int64)[:, None] * RUN + depth[None, :]
    right = x + tl.minimum(lines, rows - 1).to(tl.int64)[None, :] * x_stride + depth[:, None]
    width: tl.constexpr = RUN * (16 // BITS)
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(steps * part // splits, steps * (part + 1) // splits):
        own = tl.load(left + step * (outputs * RUN))
        for pair in tl.static_range(8 // BITS):
            first = step * width + 2 * pair * RUN
            sums = multiply_packed(
                sums, own, tl.load(right + first), tl.load(right + first + RUN), scales + held,
                zeros + held, first, outputs,
                2 * pair * BITS, BITS, GROUP, ZERO, RUN, COLUMNS, ASM, EXACT,
            )  # fmt: skip
    last, sums = sum_splits(partial, arrived, sums, tile, splits, SPLIT, ROWS, COLUMNS)
    if last:
        _keep(output, sums, scales, bias, columns, lines, rows, outputs, GROUP, BIAS)


@jit
def dequantize_packed_kernel(
    output: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    steps: tl.tensor,
    outputs: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    RUN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile of outputs, step): unpacks the whole weight [outputs, inputs] to the output's
    dtype."""
    await_earlier(DEPENDENT)
    runs: tl.constexpr = 16 // BITS
    step = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < outputs)[:, None]
    held = tl.minimum(columns, outputs - 1)
    depth = tl.arange(0, RUN)
    at = (step.to(tl.int64) * outputs + held)[:, None] * RUN + depth[None, :]
    own = tl.load(words + at)
    to = output + columns.to(tl.int64)[:, None] * (steps * runs * RUN) + depth[None, :]
    for run in tl.static_range(runs):
        first = (step * runs + run) * RUN
        group = first // GROUP if GROUP > 0 else 0
        scale = tl.load(scales + group * outputs + held).to(tl.float32)[:, None]
        zero = _zero_points(zeros + held, first, outputs, GROUP, ZERO, COLUMNS)
        whole = _run(own, zero, run * BITS, BITS) * scale
        tl.store(to + first, whole, mask=inside)
