"""A running softmax over tiles of keys, as FlashAttention-2 has it, in base 2."""

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
    """Takes one tile of keys, `scores` [ROWS, KEYS] of which times `factor` [ROWS] > 0 are powers
    of 2, into (highest, total, output).

    A row that has seen no key yet has highest = -inf, and stays so while its scores are -inf. The
    factor is applied last, where it costs nothing: in one instruction with the difference.
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
    """Sums of 2^(score - highest), to which with SINKS the logit of each of `heads` belongs too."""
    if SINKS:
        power = tl.load(sinks + heads) * 1.4426950408889634 - highest
        # Far above all scores it leaves nothing of them; exp2 of more is infinite.
        total += tl.exp2(tl.minimum(power, 126.0))
    return total


@jit
def capped(scores: tl.tensor, factor: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """(scores, factor): times `factor` [ROWS] they would be natural logarithms, squashed into
    (-SOFTCAP, SOFTCAP) unless that is 0; times the factor that is returned they are of base 2."""
    if SOFTCAP > 0.0:
        # tanh by the logistic function: the interpreter has no libdevice.
        scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (factor * 2.0 / SOFTCAP)[:, None]) - 1.0)
        factor = tl.zeros_like(factor) + 1.0
    return scores, factor * 1.4426950408889634
