"""Log probabilities of tokens that were chosen, and of prompts that are scored."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .outputs import TokenLogprobs
from .plan import ScheduledSequence
from .transfer import to_host

# Rows of logits that become log probabilities at once: some 20 MB for 128,000 tokens.
SLICE = 32
# Columns that CUDA kernels load at once: rows that begin elsewhere are summed in another order.
ALIGNED = 8


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """float32 [N, V] of logits [N, V]; a row's bits do not depend on where it stands."""
    width = logits.shape[1]
    if logits.is_cuda and width % ALIGNED:
        padded = F.pad(logits.float(), (0, -width % ALIGNED), value=-torch.inf)
        return torch.log_softmax(padded, -1)[:, :width]
    return torch.log_softmax(logits.float(), -1)


@dataclass(frozen=True, slots=True)
class LogprobEntries:
    """Of N tokens: log probabilities [N], ranks [N], and the most likely tokens [N, M] with theirs,
    of which each token wants `counts`."""

    chosen: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor
    counts: Rows[int]

    def to_host(self) -> "LogprobEntries":
        """Begins to copy them; to be read when the device is through with that."""
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


def find_logprobs(raw: torch.Tensor, tokens: torch.Tensor, counts: Rows[int]) -> LogprobEntries:
    """Raw log probabilities [N, V] and the tokens [N] to read; each with its `counts` best."""
    chosen = raw.gather(1, tokens[:, None])
    ranks = (raw > chosen).sum(-1) + 1
    most = min(max(counts), raw.shape[1])
    top = raw.topk(most, dim=-1)
    return LogprobEntries(chosen.squeeze(1), ranks, top.indices, top.values, counts)


def score_prompts(
    logits: torch.Tensor, runs: Rows[ScheduledSequence]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Of the tokens behind each run's first `scores`, whose logits are rows of [N, V], run by run.

    Log probabilities are float32 and the model's own. Works in slices, so that memory is bounded.
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
    behind = sequence.token_ids[run.start + 1 : run.start + 1 + run.scores]
    tokens = torch.tensor(behind, device=logits.device)
    found: list[TokenLogprobs] = []
    for begin in range(0, run.scores, SLICE):
        read = tokens[begin : begin + SLICE]
        raw = log_softmax(logits[begin : begin + SLICE])
        found += find_logprobs(raw, read, [count] * len(read)).read()
    return found
