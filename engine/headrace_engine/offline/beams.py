"""Beam search in the offline API, with vLLM's names and transformers' scores."""

from dataclasses import dataclass

from headrace_common.sampling.params import SamplingParams

from ..scheduler.beam_search import EarlyStopping
from .outputs import CompletionOutput, Logprob, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a search that returns `beam_width` beams, best first.

    A finished beam's score is its summed log probability divided by its number of output tokens to
    the power of `length_penalty`. `early_stopping` is SamplingParams'; `temperature` must be 0.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    include_stop_str_in_output: bool = False

    def sampling(self) -> SamplingParams:
        """The same as SamplingParams. Raises SamplingError for a value out of range."""
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            logprobs=0,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A finished beam.

    `tokens` are prompt and output; the end-of-sequence token is included only on request. `text` is
    the output's. `logprobs` has an entry for each output token.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_output(request: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
    """Converts a finished request that ran with `params.sampling()`."""
    return BeamSearchOutput(
        [_sequence(request.prompt_token_ids, choice, params) for choice in request.outputs]
    )


def _sequence(
    prompt: list[int], choice: CompletionOutput, params: BeamSearchParams
) -> BeamSearchSequence:
    tokens = choice.token_ids
    if choice.finish_reason == "stop" and not params.include_stop_str_in_output:
        tokens = tokens[:-1]
    return BeamSearchSequence(
        tokens=[*prompt, *tokens],
        logprobs=choice.logprobs or [],
        cum_logprob=choice.cumulative_logprob or 0.0,
        text=choice.text,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )
