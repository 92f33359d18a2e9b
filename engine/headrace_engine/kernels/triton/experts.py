"""Products of rows with the matrices of their experts, and the sum over experts.

One launch multiplies the rows of all experts (grouped products, as in MegaBlocks and vLLM's fused
mixtures): a program reads its expert and its rows from tiles on the device. Each row is summed in
one order, and no two programs write the same element.
"""

import triton.language as tl

from .fp8 import widened
from .jit import await_earlier, jit, jit_unspecialized


@jit
def _multiply(
    sums: tl.tensor,
    left: tl.tensor,
    weight: tl.tensor,
    mask: tl.tensor,
    scales: tl.tensor,
    columns: tl.tensor,
    start: tl.tensor,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """Adds left . weight [DEPTH, COLUMNS] to the sums, times the scales of a group."""
    right = widened(tl.load(weight, mask=mask, other=0.0), left, BITS)
    if GROUP > 0:
        scale = tl.load(scales + start // GROUP, mask=columns < OUTPUTS, other=0.0)
        sums += tl.dot(left, right, input_precision=EXACT) * scale[None, :]
    else:
        sums = tl.dot(left, right, sums, input_precision=EXACT)
    return sums


@jit
def activated(
    gate: tl.tensor,
    up: tl.tensor,
    to: tl.tensor,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
) -> tl.tensor:
    """The activation of `gate` times `up`, rounded where plain torch does, in the dtype that the
    pointer `to` points to. LIMIT above 0 means gpt-oss's clamped SwiGLU, which is not rounded."""
    wide = gate.to(to.dtype.element_ty).to(tl.float32)
    other = up.to(to.dtype.element_ty).to(tl.float32)
    if LIMIT > 0.0:
        # NaN is not above the limit, and stays NaN.
        wide = tl.where(wide > LIMIT, LIMIT, wide)
        other = tl.where(other > LIMIT, LIMIT, tl.where(other < -LIMIT, -LIMIT, other))
        made = wide * tl.sigmoid(ALPHA * wide) * (other + 1.0)
    else:
        shift = wide
        if GELU:
            # GELU's tanh approximation: a logistic function of twice tanh's argument.
            shift = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
        made = (wide * tl.sigmoid(shift)).to(to.dtype.element_ty).to(tl.float32) * other
    return made


@jit
def tile_of(
    capacity: tl.tensor, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr
) -> tl.tensor:
    """(tile of rows, outputs [COLUMNS]) of this program: TOGETHER successive tiles of rows share a
    tile of outputs."""
    width = TOGETHER * tl.cdiv(OUTPUTS, COLUMNS)
    begin = tl.program_id(0) // width * TOGETHER
    height = tl.minimum(capacity - begin, TOGETHER)
    tile = begin + tl.program_id(0) % width % height
    return tile, (tl.program_id(0) % width // height) * COLUMNS + tl.arange(0, COLUMNS)


@jit
def places_of(
    order: tl.tensor, tiles: tl.tensor, tile: tl.tensor, capacity: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """(places, pairs, mask of the tile's expert) of a tile's rows [ROWS]."""
    places = tl.load(tiles + capacity + tile) + tl.arange(0, ROWS)
    valid = places < tl.load(tiles + 2 * capacity + tile)
    pairs = tl.load(order + places, mask=valid, other=0).to(tl.int64)
    return places.to(tl.int64), pairs, valid


@jit
def _biased(sums: tl.tensor, bias: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return sums + tl.load(bias, mask=mask, other=0.0).to(tl.float32)[None, :]


@jit_unspecialized("capacity")
def grouped_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    live: tl.tensor,
    x_stride: tl.tensor,
    capacity: tl.tensor,
    PER_TOKEN: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (tile of rows, tile of outputs), of one expert.

    With GATED weight is [E, 2 OUTPUTS, INPUTS], gates first: token rows x [T, INPUTS], in the order
    of `order`, become output [pairs, OUTPUTS] after the activation. Without it weight is [E,
    OUTPUTS, INPUTS]: rows of x [pairs, INPUTS] are written to the places of their pairs. With BIAS
    there is a bias [E, outputs]. 8-bit weights have SCALES a row, of groups of GROUP inputs, a
    multiple of DEPTH; GROUP 0 means one scale for all. TOGETHER successive tiles of rows share a
    tile of weights.
    """
    await_earlier(DEPENDENT)
    tile, columns = tile_of(capacity, OUTPUTS, COLUMNS, TOGETHER)
    if tile < tl.load(live):
        expert = tl.load(tiles + tile).to(tl.int64)
        places, pairs, valid = places_of(order, tiles, tile, capacity, ROWS)
        inside = columns < OUTPUTS
        depth = tl.arange(0, DEPTH)
        if GATED:
            source = pairs // PER_TOKEN
            target = places
            first = expert * 2 * OUTPUTS + columns
        else:
            source = places
            target = pairs
            first = expert * OUTPUTS + columns
        left_at = x + source[:, None] * x_stride + depth[None, :]
        weight_at = weight + first[None, :] * INPUTS + depth[:, None]
        scales_at = weight_at  # not read if there are no scales
        others_at = weight_at
        if SCALES > 0:
            scales_at = scales + first * SCALES
            others_at = scales_at + OUTPUTS * SCALES
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        others = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, INPUTS, DEPTH):
            within = start + depth < INPUTS
            left = tl.load(left_at + start, mask=valid[:, None] & within[None, :], other=0.0)
            mask = inside[None, :] & within[:, None]
            sums = _multiply(
                sums, left, weight_at + start, mask, scales_at, columns, start,
                OUTPUTS, GROUP, BITS, EXACT,
            )  # fmt: skip
            if GATED:
                others = _multiply(
                    others, left, weight_at + OUTPUTS * INPUTS + start, mask,
                    others_at, columns, start, OUTPUTS, GROUP, BITS, EXACT,
                )  # fmt: skip
        if SCALES > 0 and GROUP == 0:
            sums *= tl.load(scales_at, mask=inside, other=0.0)[None, :]
            if GATED:
                others *= tl.load(others_at, mask=inside, other=0.0)[None, :]
        if BIAS:
            sums = _biased(sums, bias + first, inside)
            others = _biased(others, bias + first + (OUTPUTS if GATED else 0), inside)
        if GATED:
            sums = activated(sums, others, output, GELU, ALPHA, LIMIT)
        to = output + target[:, None] * OUTPUTS + columns[None, :]
        tl.store(to, sums, mask=valid[:, None] & inside[None, :])


@jit
def mix_kernel(
    output: tl.tensor,
    computed: tl.tensor,
    weights: tl.tensor,
    shared: tl.tensor,
    gate: tl.tensor,
    slots: tl.tensor,
    WIDTH: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr,
    OPENED: tl.constexpr,
    PADDED: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (token, BLOCK elements): the weighted sum of computed [T, PER_TOKEN, WIDTH], in the
    order of the weights; with SHARED also shared [T, WIDTH], with OPENED times the logistic
    function of gate [T]. With PADDED rows with slots [T] below 0 are 0. With PARTIAL pairs with a
    weight of 0 have not been computed."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    given = row >= 0
    if PADDED:
        given = tl.load(slots + row) >= 0
    mixed = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(PER_TOKEN):
        pair = row * PER_TOKEN + k
        weight = tl.load(weights + pair, mask=given, other=0.0)
        read = mask & given
        if PARTIAL:
            read = read & (weight != 0.0)
        part = tl.load(computed + pair * WIDTH + at, mask=read, other=0.0)
        mixed += weight * part.to(tl.float32)
    if SHARED:
        common = tl.load(shared + row * WIDTH + at, mask=mask & given, other=0.0)
        added = common.to(tl.float32)
        if OPENED:
            opened = tl.sigmoid(tl.load(gate + row).to(tl.float32)).to(common.dtype).to(tl.float32)
            added = (opened * added).to(common.dtype).to(tl.float32)
        mixed = mixed.to(common.dtype).to(tl.float32) + added
    tl.store(output + row * WIDTH + at, mixed, mask=mask)
