"""Chooses the next token of every row of a batch, all rows at once.

A row's token depends on its own logits, its own parameters and its own random number, never on the
other rows. Greedy rows without options cost one argmax.
"""

from collections.abc import Sequence as Rows
from math import isfinite

import numpy as np
import torch

from .filters import draw, thresholds
from .logits import adjust, wants_adjusting
from .model.ops import Ops
from .outputs import SampledToken, TokenLogprobs
from .randomness import uniforms
from .request import Sequence


class Sampler:
    def __init__(self, eos_token_ids: frozenset[int], ops: Ops) -> None:
        self._eos_token_ids, self._ops = eos_token_ids, ops

    def sample(
        self, logits: torch.Tensor, sequences: Rows[Sequence]
    ) -> tuple[SampledToken | None, ...]:
        """One token a row, None for a row with NaN or infinite logits.

        `logits` [R, V], of any float dtype, belong to the sampler from here on.
        Log probabilities are the model's own, before any parameter changed them (vLLM's default).
        """
        asked = _logprob_rows(sequences)
        raw = torch.log_softmax(_take(logits, asked).float(), -1) if asked else None
        if any(map(wants_adjusting, sequences)):
            logits = logits.float()
            adjust(logits, sequences, self._eos_token_ids)
        tokens, best = self._ops.argmax(logits)
        broken = _neutralise_broken(logits, best)
        _replace_random(tokens, logits, best, sequences)
        ids = tokens.tolist()
        if raw is None and not broken:
            return tuple(map(SampledToken, ids))
        found: dict[int, TokenLogprobs] = {}
        if raw is not None:
            found = dict(zip(asked, _logprobs(raw, tokens[asked], sequences, asked), strict=True))
        return tuple(
            None if row in broken else SampledToken(token, found.get(row))
            for row, token in enumerate(ids)
        )


def _neutralise_broken(logits: torch.Tensor, best: torch.Tensor) -> frozenset[int]:
    """The rows whose best logit is NaN or infinite; they are zeroed, so that drawing is safe."""
    broken = [row for row, value in enumerate(best.tolist()) if not isfinite(value)]
    if broken:
        logits[broken] = 0
        best[broken] = 0
    return frozenset(broken)


def _replace_random(
    tokens: torch.Tensor, logits: torch.Tensor, best: torch.Tensor, sequences: Rows[Sequence]
) -> None:
    """Writes the drawn tokens of the rows with a temperature over the greedy ones."""
    rows = [row for row, one in enumerate(sequences) if not one.request.params.greedy]
    if not rows:
        return
    chosen = [sequences[row] for row in rows]
    params = [sequence.request.params for sequence in chosen]
    temperature = torch.tensor([one.temperature for one in params], device=logits.device)
    scaled = _take(logits, rows).float() - _take(best, rows).float()[:, None]
    scaled /= temperature[:, None]
    numbers = uniforms(
        [sequence.request.seed for sequence in chosen],
        [sequence.choice for sequence in chosen],
        [sequence.output_length for sequence in chosen],
    )
    drawn = draw(scaled, thresholds(scaled, params), torch.from_numpy(numbers).to(logits.device))
    tokens[torch.tensor(rows, device=logits.device)] = drawn


def _logprob_rows(sequences: Rows[Sequence]) -> list[int]:
    return [row for row, one in enumerate(sequences) if one.request.params.logprobs is not None]


def _logprobs(
    raw: torch.Tensor, tokens: torch.Tensor, sequences: Rows[Sequence], rows: list[int]
) -> list[TokenLogprobs]:
    """The entries of `rows`; raw log probabilities [N, V] and chosen tokens [N] are theirs."""
    counts = [sequences[row].request.params.logprobs or 0 for row in rows]
    chosen = raw.gather(1, tokens[:, None])
    ranks = (raw > chosen).sum(-1) + 1
    most = min(max(counts), raw.shape[1])
    top = raw.topk(most, dim=-1)
    return [
        TokenLogprobs(logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for logprob, rank, ids, values, count in zip(
            chosen.squeeze(1).tolist(),
            ranks.tolist(),
            top.indices.tolist(),
            top.values.tolist(),
            counts,
            strict=True,
        )
    ]


def _take(matrix: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows; the matrix itself where that is all of them."""
    if len(rows) == len(matrix):
        return matrix
    return matrix.index_select(0, torch.from_numpy(np.array(rows)).to(matrix.device))
