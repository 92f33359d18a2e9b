"""`triton.jit` with types: what the rest of the package sees of a compiled kernel.

With TRITON_INTERPRET=1 in the environment before the first import, kernels run on CPU tensors.
"""

from collections.abc import Callable
from typing import Any, Protocol

import triton
import triton.language as tl

# Pointers, scalars and tiles.
Value = Any


class Kernel(Protocol):
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """The kernel's launcher over `grid` programs."""

    def __call__(self, *arguments: Value) -> Value:
        """A call out of another kernel."""


def jit(function: Callable[..., Value]) -> Kernel:
    """A kernel compiled once for each set of dtypes and constants."""
    kernel: Kernel = triton.jit(function)
    return kernel


def jit_unspecialized(*names: str) -> Callable[[Callable[..., Value]], Kernel]:
    """Like `jit`, but no value of the integers called `names` causes another compilation."""

    def decorate(function: Callable[..., Value]) -> Kernel:
        kernel: Kernel = triton.jit(function, do_not_specialize=list(names))
        return kernel

    return decorate


@jit
def softmax_step(
    scores: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    values: tl.tensor,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """Takes one tile of keys into a running softmax (base 2): (highest, total, output).

    A row that has seen no key yet has highest = -inf, and stays so while its scores are -inf.
    """
    raised = tl.maximum(highest, tl.max(scores, 1))
    shift = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(highest - shift)
    total = total * decay + tl.sum(weights, 1)
    output = output * decay[:, None]
    output = tl.dot(weights.to(values.dtype), values, output, input_precision=EXACT)
    return raised, total, output


@jit
def capped(scores: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Scaled scores, squashed into (-SOFTCAP, SOFTCAP) unless that is 0, times log2(e)."""
    if SOFTCAP > 0.0:
        # tanh by the logistic function: the interpreter has no libdevice.
        scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (scale * 2.0 / SOFTCAP)) - 1.0)
        return scores * 1.4426950408889634
    return scores * (scale * 1.4426950408889634)
