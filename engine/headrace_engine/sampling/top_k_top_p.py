"""min_p, top_k and top_p: filters the tokens of a row, and samples one.

The order is vLLM's: min_p, then top_k, then top_p over what is left. Each filter is a threshold on
the row's scaled logits, so tokens that tie with the last one kept are kept too. On CPUs the bits of
a row's result depend neither on other rows nor on the number of threads.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from headrace_common.sampling.params import SamplingParams

from ..device.transfer import to_device

# Number of most likely tokens that are sorted for top_p; rows with a larger nucleus sort all.
NUCLEUS_CANDIDATES = 256
# Probabilities are first summed in groups of this many tokens.
GROUP = 256


def thresholds(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor | None:
    """The smallest scaled logit that each row keeps, float32 [R]; None if no row has a filter.

    `scaled` is float32 [R, V]: logits divided by the temperature, with a maximum of 0 in each row.
    """
    least = np.array([least_logit(one) for one in params], dtype=np.float32)
    vocab = scaled.shape[1]
    ranked = [row for row, one in enumerate(params) if 0 < one.top_k < vocab or one.top_p < 1.0]
    if not ranked and bool(np.isneginf(least).all()):
        return None
    threshold = to_device(least, scaled.device)
    narrow = [row for row in ranked if _candidates(params[row], vocab) < vocab]
    wide = [row for row in ranked if _candidates(params[row], vocab) >= vocab]
    if narrow:
        count = max(_candidates(params[row], vocab) for row in narrow)
        wide += _rank(scaled, params, narrow, count, threshold)
    if wide:
        _rank(scaled, params, wide, vocab, threshold)
    return threshold


def sample_tokens(
    scaled: torch.Tensor, threshold: torch.Tensor | None, uniforms: torch.Tensor
) -> torch.Tensor:
    """Token ids int64 [R]: the inverse distribution function, in token order, at `uniforms`.

    `uniforms` is float64 [R] in [0, 1). Tokens below their row's `threshold` are never sampled.
    """
    weights = _exp(scaled)
    if threshold is not None:
        weights = weights.masked_fill_(scaled < threshold[:, None], 0.0)
    weights = F.pad(weights, (0, -weights.shape[1] % GROUP))
    weights = weights.view(len(weights), -1, GROUP)
    groups = _sums(weights).cumsum(-1)
    target = uniforms * groups[:, -1]
    group = _search(groups, target)
    before = F.pad(groups, (1, 0)).gather(1, group[:, None]).squeeze(1)
    rows = torch.arange(len(weights), device=scaled.device)
    inner = weights[rows, group].double().cumsum(-1)
    return group * GROUP + _search(inner, target - before)


def _search(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulative sum is above the target.

    The target is kept below the row's sum, so that rounding never selects a column without weight.
    """
    total = cumulative[:, -1]
    target = torch.minimum(target.clamp_min(0.0), torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)


def least_logit(params: SamplingParams) -> float:
    """The threshold of min_p for scaled logits."""
    return math.log(params.min_p) if params.min_p > 0.0 else -math.inf


def _candidates(params: SamplingParams, vocab: int) -> int:
    """The number of most likely tokens that usually suffices to apply the filters."""
    if 0 < params.top_k < vocab:
        return params.top_k
    return min(vocab, NUCLEUS_CANDIDATES)


def _rank(
    scaled: torch.Tensor,
    params: Sequence[SamplingParams],
    rows: list[int],
    count: int,
    threshold: torch.Tensor,
) -> list[int]:
    """Increases the `threshold` of `rows`, using the `count` largest values of each.

    Returns the rows whose nucleus has more than `count` tokens.
    """
    index = to_device(np.array(rows), scaled.device)
    block = scaled if len(rows) == len(scaled) else scaled.index_select(0, index)
    row_thresholds = threshold.index_select(0, index)
    top = _largest(block, count)
    vocab = scaled.shape[1]
    ks = to_device(np.array([_top_k(params[row], vocab) for row in rows]), scaled.device)
    kth = top.gather(1, (ks.clamp_max(count) - 1)[:, None]).squeeze(1)
    row_thresholds = torch.where(ks < vocab, torch.maximum(row_thresholds, kth), row_thresholds)
    top_ps = np.array([params[row].top_p for row in rows], dtype=np.float32)
    ps = to_device(top_ps, scaled.device)
    nucleus, complete = _nucleus(block, top, row_thresholds, ps.double(), ks)
    complete |= count == vocab
    cut = complete & (ps < 1.0)
    threshold.index_copy_(
        0, index, torch.where(cut, torch.maximum(row_thresholds, nucleus), row_thresholds)
    )
    if not any(_may_need_more(params[row], count, vocab) for row in rows):
        return []  # without waiting for the device
    missed = (~complete & (ps < 1.0)).tolist()
    return [row for row, again in zip(rows, missed, strict=True) if again]


def _may_need_more(params: SamplingParams, count: int, vocab: int) -> bool:
    """Whether the nucleus may be larger than `count` tokens."""
    unlimited = _top_k(params, vocab) == vocab
    return params.top_p < 1.0 and unlimited and count < vocab


def _nucleus(
    block: torch.Tensor,
    top: torch.Tensor,
    threshold: torch.Tensor,
    ps: torch.Tensor,
    ks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest value of each row's nucleus, and whether `top` has the whole nucleus."""
    kept = _exp(top).double().masked_fill_(top < threshold[:, None], 0.0)
    limited = ks < block.shape[1]
    everything = _sums(_exp(block).masked_fill_(block < threshold[:, None], 0.0))
    cumulative = kept.cumsum(-1)
    total = torch.where(limited, cumulative[:, -1], everything)
    target = ps * total
    inside = ((cumulative - kept) < target[:, None]) & (kept > 0)
    size = inside.sum(-1).clamp_min(1)
    smallest = top.gather(1, (size - 1)[:, None]).squeeze(1)
    return smallest, limited | (cumulative[:, -1] >= target)


def _top_k(params: SamplingParams, vocab: int) -> int:
    return params.top_k if 0 < params.top_k < vocab else vocab


def _exp(x: torch.Tensor) -> torch.Tensor:
    """Elementwise exp as a new tensor. On CPUs by numpy, which vectorises the end of a row too."""
    return x.exp() if x.device.type != "cpu" else torch.from_numpy(np.exp(x.numpy()))


def _sums(x: torch.Tensor) -> torch.Tensor:
    """float64 sums over the last dimension."""
    if x.device.type != "cpu":
        return x.sum(-1, dtype=torch.float64)
    # numpy sums each row on one thread; torch splits rows, so its rounding depends on the threads.
    return torch.from_numpy(np.add.reduce(x.double().numpy(), axis=-1))


def _largest(block: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values of each row, in descending order."""
    if block.device.type != "cpu":
        return block.topk(count, dim=-1).values
    # numpy sorts and partitions with vector instructions; torch on CPUs does not.
    values = block.numpy()
    start = values.shape[1] - count
    if start > 0:
        values = np.partition(values, start, axis=-1)[:, start:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())
