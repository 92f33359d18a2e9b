"""Chooses the next token of every row of a batch, all rows at once.

A row's token depends on its own logits, its own parameters and its own random number, never on the
other rows. Greedy rows without options cost one argmax.
"""

from collections.abc import Sequence as Rows

import numpy as np
import torch

from .drawing import Draw, draw_together
from .logits import adjust, wants_adjusting
from .logprobs import LogprobEntries, find_logprobs, log_softmax
from .model.ops import Ops
from .outputs import SampledToken
from .plan import SampleRow
from .randomness import uniforms
from .sampled import SampledRows
from .transfer import to_device


class Sampler:
    def __init__(self, eos_token_ids: frozenset[int], ops: Ops, draw: Draw = draw_together) -> None:
        self._eos_token_ids, self._ops, self._draw = eos_token_ids, ops, draw

    def ending_at(self, eos_token_ids: frozenset[int]) -> "Sampler":
        """The same with other end tokens."""
        return Sampler(eos_token_ids, self._ops, self._draw)

    def sample(
        self, logits: torch.Tensor, rows: Rows[SampleRow]
    ) -> tuple[SampledToken | None, ...]:
        """One token a row, None for a row with NaN or infinite logits; see `choose`."""
        return self.choose(logits, rows).read()

    def choose(self, logits: torch.Tensor, rows: Rows[SampleRow]) -> SampledRows:
        """One token a row, on the device, which need not be waited for.

        `logits` [R, V], of any float dtype, belong to the sampler from here on.
        Log probabilities are the model's own, before any parameter changed them (vLLM's default).
        """
        asked = _logprob_rows(rows)
        raw = log_softmax(_take(logits, asked)) if asked else None
        if any(map(wants_adjusting, rows)):
            logits = logits.float()
            adjust(logits, rows, self._eos_token_ids)
        tokens, best = self._ops.argmax(logits)
        _replace_random(tokens, logits, best, rows, self._draw)
        entries = None if raw is None else _logprobs(raw, _take(tokens, asked), rows, asked)
        return SampledRows(tokens, best, asked, entries)


def _replace_random(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    best: torch.Tensor,
    rows: Rows[SampleRow],
    draw_rows: Draw,
) -> None:
    """Writes the drawn tokens of the rows with a temperature over the greedy ones."""
    drawing = [index for index, row in enumerate(rows) if not row.sequence.request.params.greedy]
    if not drawing:
        return
    chosen = [rows[index] for index in drawing]
    params = [row.sequence.request.params for row in chosen]
    temperatures = np.array([one.temperature for one in params], dtype=np.float32)
    highest = _take(best, drawing).float()
    scaled = _take(logits, drawing).float() - highest[:, None]
    scaled /= to_device(temperatures, logits.device)[:, None]
    _neutralise_broken(scaled, highest)
    numbers = uniforms(
        [row.sequence.request.seed for row in chosen],
        [row.sequence.choice for row in chosen],
        [row.output_length for row in chosen],
    )
    drawn = draw_rows(scaled, params, to_device(numbers, logits.device))
    tokens.index_copy_(0, to_device(np.array(drawing), logits.device), drawn)


def _neutralise_broken(scaled: torch.Tensor, highest: torch.Tensor) -> None:
    """Zeroes the rows whose highest logit is NaN or infinite, so that drawing is safe."""
    broken = ~torch.isfinite(highest)
    if scaled.device.type != "cpu" or broken.any():  # a GPU is not asked, but just told
        scaled.masked_fill_(broken[:, None], 0.0)


def _logprob_rows(rows: Rows[SampleRow]) -> list[int]:
    return [index for index, row in enumerate(rows) if row.sequence.request.logprobs is not None]


def _logprobs(
    raw: torch.Tensor, tokens: torch.Tensor, rows: Rows[SampleRow], asked: list[int]
) -> LogprobEntries:
    """The entries of `asked`; raw log probabilities [N, V] and chosen tokens [N] are theirs."""
    counts = [rows[index].sequence.request.logprobs or 0 for index in asked]
    return find_logprobs(raw, tokens, counts)


def _take(matrix: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows; the matrix itself where that is all of them."""
    if len(rows) == len(matrix):
        return matrix
    return matrix.index_select(0, to_device(np.array(rows), matrix.device))
