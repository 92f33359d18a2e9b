"""What an answer shows of its prompts, and of its count of tokens before its end."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptView:
    """`echo`: the prompt's text before each choice's, and with log probabilities its tokens too.

    `only`: nothing but the prompt. `logprobs` None shows none of the prompt by themselves, k shows
    each token's and the k most likely ones. `counts`: each chunk of a stream says how many tokens
    there are so far. `prompts` are their token ids.
    """

    echo: bool = False
    only: bool = False
    logprobs: int | None = None
    counts: bool = False
    prompts: Sequence[Sequence[int]] = ()

    @property
    def field(self) -> str:
        """The field of the request that asks for it."""
        if self.counts:
            return "stream_options.continuous_usage_stats"
        return "echo" if self.echo else "prompt_logprobs"
