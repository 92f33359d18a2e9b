"""Decides when a sequence ends: a pure function of its last token and number of output tokens.

Stop strings are not checked here but where tokens become text. Before `min_tokens` the sampler
masks the ids that would end a sequence.
"""

from dataclasses import dataclass

from headrace_common.sampling.params import SamplingParams

from ..core.outputs import SampledToken
from ..core.request import FinishReason


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sequence ended. `token` is the stop token id that ended it; None for other reasons."""

    reason: FinishReason
    token: int | None = None


_LENGTH = Stop(FinishReason.LENGTH)
_EOS = Stop(FinishReason.STOP)


@dataclass(frozen=True, slots=True)
class StopRule:
    """The stop conditions of one request, checked for each token.

    `max_output` is the smaller of `max_tokens` and the context's room after the prompt.
    """

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_output: int

    @classmethod
    def of(
        cls, params: SamplingParams, eos_token_ids: frozenset[int], max_output: int
    ) -> "StopRule":
        """Makes the rule; `max_output` is the context's room after the prompt."""
        limit = max_output if params.max_tokens is None else min(params.max_tokens, max_output)
        # If a grammar allows only the end, the output must end, even against other parameters.
        structured = params.structured_outputs is not None
        return cls(
            eos_token_ids=eos_token_ids if structured or not params.ignore_eos else frozenset(),
            stop_token_ids=frozenset(params.stop_token_ids),
            min_tokens=0 if structured else params.min_tokens,
            max_output=limit,
        )

    def check(self, token: int, output_length: int) -> Stop | None:
        """Whether the output ends with `token`, which is output number `output_length` (from 1)."""
        if output_length > self.min_tokens:
            if token in self.eos_token_ids:
                return _EOS
            if token in self.stop_token_ids:
                return Stop(FinishReason.STOP, token)
        return _LENGTH if output_length >= self.max_output else None

    def cut(self, tokens: tuple[SampledToken, ...], output_length: int) -> tuple[SampledToken, ...]:
        """The new `tokens` after `output_length` others, up to the first that ends the output."""
        for count, token in enumerate(tokens, start=1):
            if self.check(token.token_id, output_length + count) is not None:
                return tokens[:count]
        return tokens
