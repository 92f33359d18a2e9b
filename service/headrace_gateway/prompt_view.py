"""What an answer shows of its prompts."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptView:
    """`echo`: the prompt's text before each choice's, and with log probabilities its tokens too.

    `only`: nothing but the prompt. `logprobs` None shows none of the prompt by themselves, k shows
    each token's and the k most likely ones. `prompts` are their token ids.
    """

    echo: bool = False
    only: bool = False
    logprobs: int | None = None
    prompts: Sequence[Sequence[int]] = ()
