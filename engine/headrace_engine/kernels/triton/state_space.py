"""The recurrences of Mamba-2 (https://arxiv.org/abs/2405.21060) and of Mamba
(https://arxiv.org/abs/2312.00752), after their convolutions.

Long runs of Mamba-2 are cut into chunks, which are computed by matrix products: a token's output
depends on the state before its chunk and on the chunk's tokens up to itself. All other runs are
computed token by token.
"""

import triton.language as tl

from .gated_delta import lower_factors
from .jit import await_earlier, jit, jit_unspecialized
from .states import matrix_places, silu, softplus


@jit_unspecialized("sources", "targets", "stride")
def state_space_kernel(
    output: tl.tensor,
    rows: tl.tensor,
    steps: tl.tensor,
    rates: tl.tensor,
    dt_bias: tl.tensor,
    skip: tl.tensor,
    pages: tl.tensor,
    more: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    fresh: tl.tensor,
    starts: tl.tensor,
    write_starts: tl.tensor,
    write_ends: tl.tensor,
    write_rows: tl.tensor,
    sequences: tl.tensor,
    steps_stride: tl.tensor,
    stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (sequence of `sequences`, head, DIM rows of its state): the outputs [T, H, P] for
    `rows` [T, C], which have the values, B and C. Computes TOKENS of them at a time."""
    await_earlier(DEPENDENT)
    sequence, head = tl.load(sequences + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    dims, inner = tl.program_id(2) * DIM + tl.arange(0, DIM), tl.arange(0, INNER)
    is_dim, is_inner = dims < HEAD_DIM, inner < STATE
    is_element = is_dim[:, None] & is_inner[None, :]
    WIDTH: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * STATE
    group = HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE
    rank = tl.arange(0, TOKENS)
    rate, bias, passed = tl.load(rates + head), tl.load(dt_bias + head), tl.load(skip + head)
    at, is_fresh = tl.load(starts + sequence), tl.load(fresh + sequence)
    places = matrix_places(
        pages, more, sources + sequence * stride, head, dims, inner,
        FIRST, HEAD_DIM, STATE, ELEMENTS, MORE,
    )  # fmt: skip
    state = tl.load(places, mask=is_element & (is_fresh == 0), other=0.0)
    kind = rows.dtype.element_ty
    for write in range(tl.load(write_starts + sequence), tl.load(write_starts + sequence + 1)):
        end = tl.load(write_ends + write)
        for first in range(at, end, TOKENS):
            tokens = (first + rank).to(tl.int64)
            inside = tokens < end
            line = rows + tokens[:, None] * WIDTH
            value = tl.load(
                line + head * HEAD_DIM + dims[None, :],
                mask=inside[:, None] & is_dim[None, :],
                other=0.0,
            )
            mask = inside[:, None] & is_inner[None, :]
            b = tl.load(line + group + inner[None, :], mask=mask, other=0.0)
            c = tl.load(line + group + GROUPS * STATE + inner[None, :], mask=mask, other=0.0)
            step = tl.load(steps + tokens * steps_stride + head, mask=inside, other=0.0)
            step = tl.where(inside, softplus(step.to(tl.float32) + bias), 0.0)
            wide = value.to(tl.float32)
            if TOKENS == 1:
                kept = tl.sum(step, 0) * rate
                change = tl.sum(wide * step[:, None], 0)[:, None]
                state = state * tl.exp(kept) + change * b.to(tl.float32)
                found = tl.sum(state * c.to(tl.float32), 1)[None, :]
            else:
                sums = tl.cumsum(step * rate, 0)
                scores = tl.dot(c, tl.trans(b), input_precision=EXACT)
                scores *= lower_factors(sums, rank) * step[None, :]
                found = tl.dot(c, tl.trans(state.to(kind)), input_precision=EXACT)
                found *= tl.exp(sums)[:, None]
                found = tl.dot(scores.to(kind), value, found, input_precision=EXACT)
                last = tl.min(sums, 0)
                change = (wide * (step * tl.exp(last - sums))[:, None]).to(kind)
                state *= tl.exp(last)
                state = tl.dot(tl.trans(change), b, state, input_precision=EXACT)
            tl.store(
                output + (tokens[:, None] * HEADS + head) * HEAD_DIM + dims[None, :],
                found + wide * passed,
                mask=inside[:, None] & is_dim[None, :],
            )
        target = targets + tl.load(write_rows + write).to(tl.int64) * stride
        if tl.load(target) >= 0:
            places = matrix_places(
                pages, more, target, head, dims, inner, FIRST, HEAD_DIM, STATE, ELEMENTS, MORE
            )
            tl.store(places, state, mask=is_element)
        at = end


@jit
def space_gate_kernel(
    output: tl.tensor,
    found: tl.tensor,
    gate: tl.tensor,
    norm: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (token, group of WIDTH elements): `found` times silu(gate). With NORM also
    its RMS norm, before the gate if NORM_FIRST, else after it."""
    await_earlier(DEPENDENT)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    mask, channels = at < WIDTH, group * WIDTH + at
    made = tl.load(found + token * (GROUPS * WIDTH) + channels, mask=mask, other=0.0)
    made = made.to(tl.float32)
    gates = tl.load(gate + token * gate_stride + channels, mask=mask, other=0.0)
    gates = silu(gates.to(tl.float32))
    if NORM:
        factor = tl.load(norm + channels, mask=mask, other=0.0).to(tl.float32)
        normed = made if NORM_FIRST else made * gates
        normed = normed * tl.rsqrt(tl.sum(normed * normed, 0) / WIDTH + eps) * factor
        made = normed * gates if NORM_FIRST else normed
    else:
        made *= gates
    tl.store(output + token * (GROUPS * WIDTH) + channels, made, mask=mask)


@jit_unspecialized("sources", "targets", "stride")
def selective_scan_kernel(
    output: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    steps: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    rates: tl.tensor,
    skip: tl.tensor,
    pages: tl.tensor,
    more: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    fresh: tl.tensor,
    starts: tl.tensor,
    write_starts: tl.tensor,
    write_ends: tl.tensor,
    write_rows: tl.tensor,
    values_stride: tl.tensor,
    gate_stride: tl.tensor,
    steps_stride: tl.tensor,
    b_stride: tl.tensor,
    c_stride: tl.tensor,
    stride: tl.tensor,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
    FIRST: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (sequence, BLOCK channels): the gated outputs [T, CHANNELS] of Mamba."""
    await_earlier(DEPENDENT)
    sequence = tl.program_id(0).to(tl.int64)
    channels, inner = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, INNER)
    is_channel, is_inner = channels < CHANNELS, inner < STATE
    is_element = is_channel[:, None] & is_inner[None, :]
    rate = tl.load(rates + channels[:, None] * STATE + inner[None, :], mask=is_element, other=0.0)
    passed = tl.load(skip + channels, mask=is_channel, other=0.0)
    at, is_fresh = tl.load(starts + sequence).to(tl.int64), tl.load(fresh + sequence)
    places = matrix_places(
        pages, more, sources + sequence * stride, 0, channels, inner,
        FIRST, CHANNELS, STATE, ELEMENTS, MORE,
    )  # fmt: skip
    state = tl.load(places, mask=is_element & (is_fresh == 0), other=0.0)
    for write in range(tl.load(write_starts + sequence), tl.load(write_starts + sequence + 1)):
        for _ in range(at, tl.load(write_ends + write)):
            value = tl.load(values + at * values_stride + channels, mask=is_channel, other=0.0)
            step = tl.load(steps + at * steps_stride + channels, mask=is_channel, other=0.0)
            gates = tl.load(gate + at * gate_stride + channels, mask=is_channel, other=0.0)
            written = tl.load(b + at * b_stride + inner, mask=is_inner, other=0.0)
            read = tl.load(c + at * c_stride + inner, mask=is_inner, other=0.0)
            value, step = value.to(tl.float32), softplus(step.to(tl.float32))
            change = (step * value)[:, None] * written.to(tl.float32)[None, :]
            state = state * tl.exp(step[:, None] * rate) + change
            found = tl.sum(state * read.to(tl.float32)[None, :], 1) + value * passed
            made = found * silu(gates.to(tl.float32))
            tl.store(output + at * CHANNELS + channels, made, mask=is_channel)
            at += 1
        target = targets + tl.load(write_rows + write).to(tl.int64) * stride
        if tl.load(target) >= 0:
            places = matrix_places(
                pages, more, target, 0, channels, inner,
                FIRST, CHANNELS, STATE, ELEMENTS, MORE,
            )  # fmt: skip
            tl.store(places, state, mask=is_element)
