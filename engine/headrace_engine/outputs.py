"""What the engine's core hands out after a step.

What there is one of for each sequence and step is a tuple: a frozen dataclass takes some times as
long to make, which was half of a step's planning.
"""

from dataclasses import dataclass
from typing import NamedTuple

from .request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: the chosen token's, its rank (1: most likely), the top."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None


class SequenceOutput(NamedTuple):
    """What one step added to one choice. `index` is the output position of the first new token.

    A finished choice has a `finish_reason`; `stop_token` is the stop token id that ended it, None
    for the end-of-sequence token. `cached_tokens` counts prompt tokens found in the prefix cache.
    `logprobs` has one entry a token, or is None where the request asked for none. `reason` says
    in words why the policy ended a choice, whose `finish_reason` is then ABORT, or why its
    grammar did (ERROR). `embedding` (packed float32) is all there is where the request asked for
    one. `prompt_logprobs`, of the prompt but for its first token, come once a request that asked.
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
