"""Products of rows with the packed int4 or int8 matrices of their experts: like `experts`, with
weights as the left factor."""

import triton.language as tl

from .experts import activated, places_of, tile_of
from .jit import await_earlier, jit, jit_unspecialized
from .packed import multiply_packed


@jit
def _run_of_rows(
    rows: tl.tensor,
    first: tl.tensor,
    valid: tl.tensor,
    INPUTS: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
) -> tl.tensor:
    """[RUN, ROWS]: inputs from `first` on, of the valid rows that `rows` [1, ROWS] point to."""
    at = first + tl.arange(0, RUN)[:, None]
    mask = valid[None, :]
    if INPUTS % STEP > 0:
        mask = mask & (at < INPUTS)
    return tl.load(rows + at, mask=mask, other=0.0)


@jit_unspecialized("capacity")
def grouped_packed_kernel(
    output: tl.tensor,
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    live: tl.tensor,
    x_stride: tl.tensor,
    capacity: tl.tensor,
    PER_TOKEN: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    ASM: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile of rows, tile of outputs), of one expert.

    words int16 [E, STEPS, outputs, RUN], scales and uint8 zeros [E, GROUPS, outputs] are those of
    packed_linear_kernel for each expert. With GATED there are 2 OUTPUTS, gates first: token rows x
    [T, INPUTS], in the order of `order`, become output [pairs, OUTPUTS] after the activation.
    Without it there are OUTPUTS: rows of x [pairs, INPUTS] are written to the places of their
    pairs. TOGETHER successive tiles of rows share a tile of weights.
    """
    await_earlier(DEPENDENT)
    tile, columns = tile_of(capacity, OUTPUTS, COLUMNS, TOGETHER)
    if tile < tl.load(live):
        expert = tl.load(tiles + tile).to(tl.int64)
        places, pairs, valid = places_of(order, tiles, tile, capacity, ROWS)
        held = tl.minimum(columns, OUTPUTS - 1)
        source = pairs // PER_TOKEN if GATED else places
        target = places if GATED else pairs
        all_outputs: tl.constexpr = OUTPUTS * (2 if GATED else 1)
        right = x + source[None, :] * x_stride
        left = words + expert * (STEPS * all_outputs * RUN)
        left += (held * RUN)[:, None] + tl.arange(0, RUN)[None, :]
        scales_at = scales + expert * (GROUPS * all_outputs) + held
        zeros_at = zeros + expert * (GROUPS * all_outputs) + held
        spanned: tl.constexpr = RUN * (16 // BITS)
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        others = tl.zeros([COLUMNS, ROWS], tl.float32)
        for step in range(0, STEPS):
            own = tl.load(left + step * (all_outputs * RUN))
            other = tl.load(left + (step * all_outputs + OUTPUTS) * RUN) if GATED else own
            for pair in tl.static_range(8 // BITS):
                first = step * spanned + 2 * pair * RUN
                x_a = _run_of_rows(right, first, valid, INPUTS, spanned, RUN)
                x_b = _run_of_rows(right, first + RUN, valid, INPUTS, spanned, RUN)
                sums = multiply_packed(
                    sums, own, x_a, x_b, scales_at, zeros_at, first, all_outputs,
                    2 * pair * BITS, BITS, GROUP, ZERO, RUN, COLUMNS, ASM, EXACT,
                )  # fmt: skip
                if GATED:
                    others = multiply_packed(
                        others, other, x_a, x_b, scales_at + OUTPUTS, zeros_at + OUTPUTS, first,
                        all_outputs, 2 * pair * BITS, BITS, GROUP, ZERO, RUN, COLUMNS, ASM, EXACT,
                    )  # fmt: skip
        if GROUP == 0:
            sums *= tl.load(scales_at).to(tl.float32)[:, None]
            if GATED:
                others *= tl.load(scales_at + OUTPUTS).to(tl.float32)[:, None]
        if BIAS:
            bias_at = bias + expert * all_outputs + held
            sums += tl.load(bias_at).to(tl.float32)[:, None]
            if GATED:
                others += tl.load(bias_at + OUTPUTS).to(tl.float32)[:, None]
        if GATED:
            sums = activated(sums, others, output, GELU, ALPHA, LIMIT)
        to = output + target[None, :] * OUTPUTS + columns[:, None]
        tl.store(to, sums, mask=(columns < OUTPUTS)[:, None] & valid[None, :])
