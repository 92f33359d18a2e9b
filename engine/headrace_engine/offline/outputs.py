"""The results of the offline API, with vLLM's names: scripts only change their imports."""

from dataclasses import dataclass, field

from ..lora.request import LoRARequest


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token at one position; rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `stop_reason` is the stop string or stop token id that ended it, else None.

    If the scheduling policy ended it (`finish_reason` abort), `stop_reason` says why. `logprobs`
    has an entry for each token, which maps token ids (the chosen one and the most likely) to their
    log probabilities; it is None if the request asked for none.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """The times of a request in seconds since 1970; None until they are known.

    `num_generation_tokens` counts the tokens of all choices.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its choices. `prompt` is None if the prompt was given as token ids.

    `prompt_logprobs` has an entry for each token of the prompt; the first one is None. It is None
    if the request asked for none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    # Whether the request has ended, even if its last choice is not among `outputs` (DELTA).
    finished: bool = False
