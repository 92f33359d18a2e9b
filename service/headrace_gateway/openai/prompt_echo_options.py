"""Options for an answer that repeats its prompts, or counts its tokens before its end."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEchoOptions:
    """The options.

    `echo`: the prompt's text comes before each choice's text, and with log probabilities its
    tokens too. `only`: the answer has only the prompt. `logprobs`: the number of most likely tokens
    to show at each position of the prompt; None shows no log probabilities. `counts`: each chunk of
    a stream has the number of tokens so far.
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
