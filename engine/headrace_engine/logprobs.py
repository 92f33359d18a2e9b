"""Log probabilities of tokens that were chosen, and of prompts that are scored."""

from collections.abc import Sequence as Rows

import torch

from .outputs import TokenLogprobs
from .plan import ScheduledSequence

# Rows of logits that become log probabilities at once: some 20 MB for 128,000 tokens.
SLICE = 32


def read_logprobs(
    raw: torch.Tensor, tokens: torch.Tensor, counts: Rows[int]
) -> list[TokenLogprobs]:
    """Raw log probabilities [N, V] and the tokens [N] to read; each with its `counts` best."""
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
        raw = torch.log_softmax(logits[begin : begin + SLICE].float(), -1)
        found += read_logprobs(raw, read, [count] * len(read))
    return found
