"""Options for an answer that repeats its prompts, or counts its tokens before its end."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEchoOptions:
    """`echo`: the prompt's text before each choice's, and with log probabilities its tokens too.

    `only`: nothing but the prompt. `logprobs` None shows none for the prompt; k shows each token's
    and the k likeliest ones. `counts`: each chunk of a stream has the number of tokens so far.
    """

    echo: bool = False
    only: bool = False
    logprobs: int | None = None
    counts: bool = False

    @property
    def field(self) -> str:
        """The field of the request that asks for it."""
        if self.counts:
            return "stream_options.continuous_usage_stats"
        return "echo" if self.echo else "prompt_logprobs"
