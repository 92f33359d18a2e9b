"""Outputs that the engine's core returns after a step.

Objects made for each sequence in each step are named tuples: making frozen dataclasses took half
of a step's scheduling time.
"""

from dataclasses import dataclass
from typing import NamedTuple

from .request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: chosen token, its rank (1: most likely), top."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None


class SequenceOutput(NamedTuple):
    """The tokens that one step added to one choice. `index` is the output position of the first new
    token.

    A finished choice has a `finish_reason`; `stop_token` is the stop token id that ended it, None
    for the end-of-sequence token. `cached_tokens` counts prompt tokens found in the prefix cache.
    `logprobs` has an entry for each token, or is None if the request asked for none. `reason` is
    text that says why the policy (`finish_reason` ABORT) or the grammar (ERROR) ended the choice.
    For an embedding request `embedding` (packed float32) replaces the tokens. `prompt_logprobs` has
    the prompt's tokens without the first one; it comes once, if the request asked for it.
    """

    request_id: str
    choice: int
    index: int  # type: ignore[assignment]  # in place of the method that tuples have
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    reason: str | None = None
    embedding: bytes | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
