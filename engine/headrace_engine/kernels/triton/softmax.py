"""A running softmax over tiles of keys, as in FlashAttention-2, in base 2."""

import triton.language as tl

from .jit import jit


@jit
def softmax_step(
    scores: tl.tensor,
    factor: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    values: tl.tensor,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """Adds one tile of keys to (highest, total, output). `scores` [ROWS, KEYS] times `factor`
    [ROWS] > 0 are logarithms to base 2.

    A row that has seen no key yet has highest = -inf, and keeps it while its scores are -inf. The
    factor is applied last, in the same instruction as the difference, where it costs nothing.
    """
    raised = tl.maximum(highest, tl.max(scores, 1) * factor)
    shift = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores * factor[:, None] - shift[:, None])
    decay = tl.exp2(highest - shift)
    total = total * decay + tl.sum(weights, 1)
    output = output * decay[:, None]
    output = tl.dot(weights.to(values.dtype), values, output, input_precision=EXACT)
    return raised, total, output


@jit
def with_sinks(
    total: tl.tensor,
    highest: tl.tensor,
    sinks: tl.tensor,
    heads: tl.tensor,
    SINKS: tl.constexpr,
) -> tl.tensor:
    """Sums of 2^(score - highest); with SINKS they include the logit of each of `heads`."""
    if SINKS:
        power = tl.load(sinks + heads) * 1.4426950408889634 - highest
        # A sink far above all scores leaves nothing of them; exp2 of a larger number is infinite.
        total += tl.exp2(tl.minimum(power, 126.0))
    return total


@jit
def capped(scores: tl.tensor, factor: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """(scores, factor). Scores times the given `factor` [ROWS] are natural logarithms; they are
    capped to (-SOFTCAP, SOFTCAP) unless that is 0. Times the returned factor they have base 2."""
    if SOFTCAP > 0.0:
        # tanh by the logistic function: the interpreter has no libdevice.
        scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (factor * 2.0 / SOFTCAP)[:, None]) - 1.0)
        factor = tl.zeros_like(factor) + 1.0
    return scores, factor * 1.4426950408889634
