"""Causal convolutions of recurrent layers, whose states are windows of past inputs.

A sequence's window [C, SIZE - 1] is the first tensor of its state; `states` describes its place.
"""

import triton.language as tl

from .jit import await_earlier, jit, jit_unspecialized
from .states import clamped, silu, state_places


@jit
def inputs_at(
    x: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    mask: tl.tensor,
    begin: tl.tensor,
    fresh: tl.tensor,
    pages: tl.tensor,
    more: tl.tensor,
    blocks: tl.tensor,
    SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
) -> tl.tensor:
    """Inputs [tokens, channels] of a sequence whose run begins at token `begin`. Those before it
    are in the window at `blocks`, or zeros if the sequence is `fresh`."""
    own = (tokens >= begin)[:, None]
    line = x + tokens.to(tl.int64)[:, None] * x_stride
    new = tl.load(line + channels[None, :], mask=mask & own, other=0.0)
    before = mask & (tokens < begin)[:, None] & (fresh == 0)
    elements = channels[None, :] * (SIZE - 1) + (tokens - begin)[:, None] + (SIZE - 1)
    places = state_places(pages, more, blocks, tl.where(before, elements, 0), ELEMENTS, MORE)
    old = tl.load(places, mask=before, other=0.0)
    return tl.where(own, new, old)


@jit
def convolved(
    x: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    mask: tl.tensor,
    begin: tl.tensor,
    fresh: tl.tensor,
    pages: tl.tensor,
    more: tl.tensor,
    blocks: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
) -> tl.tensor:
    """The convolution's outputs [tokens, channels], in float32."""
    found = tl.zeros([tokens.shape[0], channels.shape[0]], tl.float32)
    for tap in tl.static_range(SIZE):
        value = inputs_at(
            x, x_stride, tokens + (tap - SIZE + 1), channels, mask, begin, fresh,
            pages, more, blocks, SIZE, ELEMENTS, MORE,
        )  # fmt: skip
        factor = tl.load(weight + channels * SIZE + tap).to(tl.float32)
        found += value.to(tl.float32) * factor[None, :]
    if bias is not None:
        found += tl.load(bias + channels).to(tl.float32)[None, :]
    return found


@jit
def write_window(
    x: tl.tensor,
    x_stride: tl.tensor,
    end: tl.tensor,
    channels: tl.tensor,
    mask: tl.tensor,
    begin: tl.tensor,
    fresh: tl.tensor,
    pages: tl.tensor,
    more: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
) -> None:
    """Writes the window before token `end`, which may replace the one at `source`."""
    taps = tl.arange(0, TAPS)
    wanted = (taps < SIZE - 1)[:, None] & mask
    values = inputs_at(
        x, x_stride, end - (SIZE - 1) + taps, channels, wanted, begin, fresh,
        pages, more, source, SIZE, ELEMENTS, MORE,
    )  # fmt: skip
    tl.debug_barrier()
    if tl.load(target) >= 0:
        elements = channels[None, :] * (SIZE - 1) + taps[:, None]
        places = state_places(pages, more, target, tl.where(wanted, elements, 0), ELEMENTS, MORE)
        tl.store(places, values, mask=wanted)


@jit
def write_windows(
    x: tl.tensor,
    x_stride: tl.tensor,
    sequence: tl.tensor,
    channels: tl.tensor,
    mask: tl.tensor,
    begin: tl.tensor,
    fresh: tl.tensor,
    pages: tl.tensor,
    more: tl.tensor,
    source: tl.tensor,
    targets: tl.tensor,
    write_starts: tl.tensor,
    write_ends: tl.tensor,
    write_rows: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
) -> None:
    """Writes the window of a sequence's channels after each of its runs. The last one may replace
    the one at `source`."""
    tl.debug_barrier()
    for write in range(tl.load(write_starts + sequence), tl.load(write_starts + sequence + 1)):
        target = targets + tl.load(write_rows + write).to(tl.int64) * stride
        write_window(
            x, x_stride, tl.load(write_ends + write), channels, mask, begin, fresh,
            pages, more, source, target, SIZE, TAPS, ELEMENTS, MORE,
        )  # fmt: skip


@jit_unspecialized("sources", "targets", "stride")
def convolve_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    pages: tl.tensor,
    more: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    fresh: tl.tensor,
    starts: tl.tensor,
    write_starts: tl.tensor,
    write_ends: tl.tensor,
    write_rows: tl.tensor,
    chunk_sequences: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_ends: tl.tensor,
    x_stride: tl.tensor,
    stride: tl.tensor,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    WRITE: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (chunk, BLOCK channels): the outputs [T, CHANNELS] of a chunk's tokens, in tiles of
    TOKENS. With WRITE a chunk is a whole sequence, and its windows are written."""
    await_earlier(DEPENDENT)
    chunk = tl.program_id(0)
    sequence = tl.load(chunk_sequences + chunk).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channels < CHANNELS
    channels = clamped(channels, CHANNELS, BLOCK)
    begin, is_fresh = tl.load(starts + sequence), tl.load(fresh + sequence)
    source, end = sources + sequence * stride, tl.load(chunk_ends + chunk)
    for first in range(tl.load(chunk_starts + chunk), end, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        mask = (tokens < end)[:, None] & exists[None, :]
        found = convolved(
            x, x_stride, tokens, channels, mask, begin, is_fresh,
            pages, more, source, weight, bias, SIZE, ELEMENTS, MORE,
        )  # fmt: skip
        if SILU:
            found = silu(found)
        line = output + tokens.to(tl.int64)[:, None] * CHANNELS
        tl.store(line + channels[None, :], found, mask=mask)
    if WRITE:
        write_windows(
            x, x_stride, sequence, channels, exists[None, :], begin, is_fresh,
            pages, more, source, targets, write_starts, write_ends, write_rows, stride,
            SIZE, TAPS, ELEMENTS, MORE,
        )  # fmt: skip


@jit_unspecialized("sources", "targets", "stride")
def window_kernel(
    x: tl.tensor,
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
    x_stride: tl.tensor,
    stride: tl.tensor,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (sequence of `sequences`, BLOCK channels): writes the windows after its runs. Runs
    after the kernel of the convolution, which reads the window before the runs."""
    await_earlier(DEPENDENT)
    sequence = tl.load(sequences + tl.program_id(0)).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channels < CHANNELS
    write_windows(
        x, x_stride, sequence, clamped(channels, CHANNELS, BLOCK), exists[None, :],
        tl.load(starts + sequence), tl.load(fresh + sequence),
        pages, more, sources + sequence * stride, targets,
        write_starts, write_ends, write_rows, stride,
        SIZE, TAPS, ELEMENTS, MORE,
    )  # fmt: skip
