"""Kernels over rows of hidden states: RMS norms, the residual sum before one, gated SiLU.

They round to the tensors' dtype where plain torch does.
"""

import triton.language as tl

from .jit import await_earlier, jit, prefetch


@jit
def rms_norm_kernel(
    output: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    x_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (row). With ADD normalises x + residual, and stores that in `residual`."""
    if DEPENDENT > 0:
        PIECES: tl.constexpr = BLOCK // 32 if BLOCK > 32 else 1
        prefetch(weight + tl.minimum(tl.arange(0, PIECES) * 32, WIDTH - 1))
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    made = tl.load(x + row * x_stride + at, mask=mask, other=0.0)
    # Loaded with the row: a load after the sum would have to be waited for once more.
    factor = tl.load(weight + at, mask=mask, other=0.0)
    if ADD:
        before = tl.load(residual + row * WIDTH + at, mask=mask, other=0.0)
        made = (made.to(tl.float32) + before.to(tl.float32)).to(made.dtype)
        tl.store(residual + row * WIDTH + at, made, mask=mask)
    wide = made.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = (wide * scale).to(made.dtype).to(tl.float32) * factor.to(tl.float32)
    tl.store(output + row * WIDTH + at, normed, mask=mask)


@jit
def silu_mul_kernel(
    output: tl.tensor,
    gate_up: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (row, BLOCK elements): silu of the row's first half times its second half."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    gate = tl.load(gate_up + row * stride + at, mask=mask, other=0.0)
    up = tl.load(gate_up + row * stride + WIDTH + at, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(output + row * WIDTH + at, silu * up.to(tl.float32), mask=mask)
