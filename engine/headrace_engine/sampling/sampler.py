"""Samples the next token of all rows of a batch at once.

A row's token depends only on its own logits, parameters and random number. Greedy rows without
options cost one argmax.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..core.outputs import SampledToken
from ..core.step_plan import SampleRow
from ..device.transfer import to_device
from ..operators.base import Ops
from .logits_processors import adjust, wants_adjusting
from .logprobs import LogprobEntries, find_logprobs, log_softmax
from .random_sampling import RandomSampler, sample_together
from .rng import uniforms
from .sampler_output import SamplerOutput


class Sampler:
    def __init__(
        self,
        eos_token_ids: frozenset[int],
        ops: Ops,
        random_sampler: RandomSampler = sample_together,
    ) -> None:
        self._eos_token_ids, self._ops, self._random_sampler = eos_token_ids, ops, random_sampler

    def ending_at(self, eos_token_ids: frozenset[int]) -> "Sampler":
        """A sampler that differs only in its end-of-sequence tokens."""
        return Sampler(eos_token_ids, self._ops, self._random_sampler)

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SampleRow]
    ) -> tuple[SampledToken | None, ...]:
        """One token for each row; None for a row with NaN or infinite logits. See `choose`."""
        return self.choose(logits, rows).read()

    def choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> SamplerOutput:
        """One token for each row, on the device; does not wait for it.

        `logits` [R, V], of any float dtype, may be overwritten. Log probabilities are those before
        any parameter changes the logits (vLLM's default).
        """
        asked = _logprob_rows(rows)
        raw = log_softmax(_take(logits, asked)) if asked else None
        if any(map(wants_adjusting, rows)):
            logits = logits.float()
            adjust(logits, rows, self._eos_token_ids)
        tokens, best = self._ops.argmax(logits)
        _replace_random(tokens, logits, best, rows, self._random_sampler)
        entries = None if raw is None else _logprobs(raw, _take(tokens, asked), rows, asked)
        return SamplerOutput(tokens, best, asked, entries)


def _replace_random(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    best: torch.Tensor,
    rows: Sequence[SampleRow],
    random_sampler: RandomSampler,
) -> None:
    """Replaces the greedy tokens of rows with a temperature by sampled ones."""
    random_rows = [
        index for index, row in enumerate(rows) if not row.sequence.request.params.greedy
    ]
    if not random_rows:
        return
    chosen = [rows[index] for index in random_rows]
    params = [row.sequence.request.params for row in chosen]
    temperatures = np.array([one.temperature for one in params], dtype=np.float32)
    highest = _take(best, random_rows).float()
    scaled = _take(logits, random_rows).float() - highest[:, None]
    scaled /= to_device(temperatures, logits.device)[:, None]
    _neutralise_broken(scaled, highest)
    numbers = uniforms(
        [row.sequence.request.seed for row in chosen],
        [row.sequence.choice for row in chosen],
        [row.output_length for row in chosen],
    )
    sampled = random_sampler(scaled, params, to_device(numbers, logits.device))
    tokens.index_copy_(0, to_device(np.array(random_rows), logits.device), sampled)


def _neutralise_broken(scaled: torch.Tensor, highest: torch.Tensor) -> None:
    """Sets rows whose highest logit is NaN or infinite to zero, so that sampling is safe."""
    broken = ~torch.isfinite(highest)
    if scaled.device.type != "cpu" or broken.any():  # without waiting for a GPU
        scaled.masked_fill_(broken[:, None], 0.0)


def _logprob_rows(rows: Sequence[SampleRow]) -> list[int]:
    return [index for index, row in enumerate(rows) if row.sequence.request.logprobs is not None]


def _logprobs(
    raw: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SampleRow], asked: list[int]
) -> LogprobEntries:
    """The entries of the rows `asked`, from their log probabilities [N, V] and tokens [N]."""
    counts = [rows[index].sequence.request.logprobs or 0 for index in asked]
    return find_logprobs(raw, tokens, counts)


def _take(matrix: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows; the matrix itself if that is all of them."""
    if len(rows) == len(matrix):
        return matrix
    return matrix.index_select(0, to_device(np.array(rows), matrix.device))
