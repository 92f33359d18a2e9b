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
from .logprobs import read_logprobs
from .model.ops import Ops
from .outputs import SampledToken, TokenLogprobs
from .plan import SampleRow
from .randomness import uniforms


class Sampler:
    def __init__(self, eos_token_ids: frozenset[int], ops: Ops) -> None:
        self._eos_token_ids, self._ops = eos_token_ids, ops

    def sample(
        self, logits: torch.Tensor, rows: Rows[SampleRow]
    ) -> tuple[SampledToken | None, ...]:
        """One token a row, None for a row with NaN or infinite logits.

        `logits` [R, V], of any float dtype, belong to the sampler from here on.
        Log probabilities are the model's own, before any parameter changed them (vLLM's default).
        """
        asked = _logprob_rows(rows)
        raw = torch.log_softmax(_take(logits, asked).float(), -1) if asked else None
        if any(map(wants_adjusting, rows)):
            logits = logits.float()
            adjust(logits, rows, self._eos_token_ids)
        tokens, best = self._ops.argmax(logits)
        broken = _neutralise_broken(logits, best)
        _replace_random(tokens, logits, best, rows)
        ids = tokens.tolist()
        if raw is None and not broken:
            return tuple(map(SampledToken, ids))
        found: dict[int, TokenLogprobs] = {}
        if raw is not None:
            found = dict(zip(asked, _logprobs(raw, tokens[asked], rows, asked), strict=True))
        return tuple(
            None if index in broken else SampledToken(token, found.get(index))
            for index, token in enumerate(ids)
        )


def _neutralise_broken(logits: torch.Tensor, best: torch.Tensor) -> frozenset[int]:
    """The rows whose best logit is NaN or infinite; they are zeroed, so that drawing is safe."""
    broken = [row for row, value in enumerate(best.tolist()) if not isfinite(value)]
    if broken:
        logits[broken] = 0
        best[broken] = 0
    return frozenset(broken)


def _replace_random(
    tokens: torch.Tensor, logits: torch.Tensor, best: torch.Tensor, rows: Rows[SampleRow]
) -> None:
    """Writes the drawn tokens of the rows with a temperature over the greedy ones."""
    drawing = [index for index, row in enumerate(rows) if not row.sequence.request.params.greedy]
    if not drawing:
        return
    chosen = [rows[index] for index in drawing]
    params = [row.sequence.request.params for row in chosen]
    temperature = torch.tensor([one.temperature for one in params], device=logits.device)
    scaled = _take(logits, drawing).float() - _take(best, drawing).float()[:, None]
    scaled /= temperature[:, None]
    numbers = uniforms(
        [row.sequence.request.seed for row in chosen],
        [row.sequence.choice for row in chosen],
        [row.output_length for row in chosen],
    )
    drawn = draw(scaled, thresholds(scaled, params), torch.from_numpy(numbers).to(logits.device))
    tokens[torch.tensor(drawing, device=logits.device)] = drawn


def _logprob_rows(rows: Rows[SampleRow]) -> list[int]:
    return [index for index, row in enumerate(rows) if row.sequence.request.logprobs is not None]


def _logprobs(
    raw: torch.Tensor, tokens: torch.Tensor, rows: Rows[SampleRow], asked: list[int]
) -> list[TokenLogprobs]:
    """The entries of `asked`; raw log probabilities [N, V] and chosen tokens [N] are theirs."""
    counts = [rows[index].sequence.request.logprobs or 0 for index in asked]
    return read_logprobs(raw, tokens, counts)


def _take(matrix: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows; the matrix itself where that is all of them."""
    if len(rows) == len(matrix):
        return matrix
    return matrix.index_select(0, torch.from_numpy(np.array(rows)).to(matrix.device))
