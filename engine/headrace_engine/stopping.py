"""When a sequence ends: a pure function of its last token and its number of output tokens.

Stop strings are not looked at here: they are matched on text by whoever detokenises. Before
`min_tokens` the sampler masks the ids that would end a sequence, so none is expected there.
"""

from dataclasses import dataclass

from headrace_common.sampling import SamplingParams

from .outputs import SampledToken
from .request import FinishReason


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sequence ended. `token` is the id of `stop_token_ids` that did it, None for others."""

    reason: FinishReason
    token: int | None = None


_LENGTH = Stop(FinishReason.LENGTH)
_EOS = Stop(FinishReason.STOP)


@dataclass(frozen=True, slots=True)
class StopRule:
    """The stop conditions of one request, made once and asked for each token.

    `max_output` is the smaller of `max_tokens` and what the context leaves after the prompt.
    """

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_output: int

    @classmethod
    def of(
        cls, params: SamplingParams, eos_token_ids: frozenset[int], max_output: int
    ) -> "StopRule":
        """`max_output` is the context's limit: the most output tokens that it holds."""
        limit = max_output if params.max_tokens is None else min(params.max_tokens, max_output)
        # A grammar that leaves nothing but the end has the last word on when the output ends.
        structured = params.structured_outputs is not None
        return cls(
            eos_token_ids=eos_token_ids if structured or not params.ignore_eos else frozenset(),
            stop_token_ids=frozenset(params.stop_token_ids),
            min_tokens=0 if structured else params.min_tokens,
            max_output=limit,
        )

    def check(self, token: int, output_length: int) -> Stop | None:
        """The verdict after `token` became output number `output_length` (1 is the first)."""
        if output_length > self.min_tokens:
            if token in self.eos_token_ids:
                return _EOS
            if token in self.stop_token_ids:
                return Stop(FinishReason.STOP, token)
        return _LENGTH if output_length >= self.max_output else None

    def cut(self, tokens: tuple[SampledToken, ...], output_length: int) -> tuple[SampledToken, ...]:
        """`tokens`, which follow `output_length` others, up to the first that ends the output."""
        for count, token in enumerate(tokens, start=1):
            if self.check(token.token_id, output_length + count) is not None:
                return tokens[:count]
        return tokens
