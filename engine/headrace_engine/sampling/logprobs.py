"""Log probabilities of sampled tokens and of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..core.outputs import TokenLogprobs
from ..core.step_plan import ScheduledSequence
from ..device.transfer import to_host

# Rows of logits that become log probabilities at once: about 20 MB for a vocabulary of 128,000.
SLICE = 32
# CUDA kernels load this many columns at once and sum unaligned rows in another order.
ALIGNED = 8


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log probabilities float32 [N, V]; a row's bits do not depend on its place in the batch."""
    width = logits.shape[1]
    if logits.is_cuda and width % ALIGNED:
        padded = F.pad(logits.float(), (0, -width % ALIGNED), value=-torch.inf)
        return torch.log_softmax(padded, -1)[:, :width]
    return torch.log_softmax(logits.float(), -1)


@dataclass(frozen=True, slots=True)
class LogprobEntries:
    """Log probabilities [N] and ranks [N] of N tokens, and the most likely tokens [N, M].

    Token i returns the first `counts[i]` of the most likely tokens.
    """

    chosen: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor
    counts: Sequence[int]

    def to_host(self) -> "LogprobEntries":
        """Starts the copy to the host; `read` it when the device has finished."""
        return LogprobEntries(
            to_host(self.chosen),
            to_host(self.ranks),
            to_host(self.top_ids),
            to_host(self.top_values),
            self.counts,
        )

    def read(self) -> list[TokenLogprobs]:
        return [
            TokenLogprobs(logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
            for logprob, rank, ids, values, count in zip(
                self.chosen.tolist(),
                self.ranks.tolist(),
                self.top_ids.tolist(),
                self.top_values.tolist(),
                self.counts,
                strict=True,
            )
        ]


def find_logprobs(raw: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> LogprobEntries:
    """Reads tokens [N] from log probabilities [N, V], each with its `counts` most likely tokens."""
    chosen = raw.gather(1, tokens[:, None])
    ranks = (raw > chosen).sum(-1) + 1
    most = min(max(counts), raw.shape[1])
    top = raw.topk(most, dim=-1)
    return LogprobEntries(chosen.squeeze(1), ranks, top.indices, top.values, counts)


def score_prompts(
    logits: torch.Tensor, runs: Sequence[ScheduledSequence]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Log probabilities of the tokens that follow the first `scores` tokens of each run.

    `logits` [N, V] has one row for each of them, run by run. Works in slices to bound memory.
    """
    found: list[tuple[TokenLogprobs, ...]] = []
    at = 0
    for run in runs:
        found.append(tuple(_score(logits[at : at + run.scores], run)))
        at += run.scores
    return tuple(found)


def _score(logits: torch.Tensor, run: ScheduledSequence) -> list[TokenLogprobs]:
    sequence = run.sequence
    count = sequence.request.params.prompt_logprobs or 0
    next_tokens = sequence.token_ids[run.start + 1 : run.start + 1 + run.scores]
    tokens = torch.tensor(next_tokens, device=logits.device)
    found: list[TokenLogprobs] = []
    for begin in range(0, run.scores, SLICE):
        read = tokens[begin : begin + SLICE]
        raw = log_softmax(logits[begin : begin + SLICE])
        found += find_logprobs(raw, read, [count] * len(read)).read()
    return found
