"""How a request's tokens are chosen, as the offline API, the gateway and the engine all see it.

Plain standard library, so that the engine's core needs nothing else to read it. Names and defaults
are vLLM's, so that scripts move over by changing an import.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


class SamplingError(ValueError):
    """A sampling parameter is out of range. `field` names it; the message says what is allowed."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(f"{field_name}: {message}")
        self.field = field_name


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, checked when made.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps every token. `logprobs` None returns none, 0
    the chosen token's, k > 0 also the k most likely ones. `max_tokens` None generates up to the
    model's context. `stop` strings are matched on text by whoever detokenises; the engine core
    sees only ids. Without a `seed` the caller draws one, so that a request that moves to another
    engine goes on with the same random numbers.

    Raises SamplingError for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    logprobs: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _whole("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError("min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        self._check_stops()
        _check_bias(self.logit_bias)

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise SamplingError("stop", f"at most {MAX_STOP_STRINGS} strings are allowed")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise SamplingError("stop", "each stop must be a string that is not empty")
            if len(text) > MAX_STOP_STRING_CHARS:
                raise SamplingError(
                    "stop", f"each stop may have at most {MAX_STOP_STRING_CHARS} characters"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise SamplingError("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids are allowed")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31 - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises SamplingError where a token id of a field is not below `vocab_size`."""
        for name, ids in (
            ("logit_bias", self.logit_bias.keys()),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise SamplingError(name, f"token id {token} is not below {vocab_size}")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SamplingError(name, f"must be a whole number, not {value!r:.60}")
    if not low <= value <= high:
        raise SamplingError(name, f"must be between {low} and {high}, not {value}")


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SamplingError(name, f"must be a finite number, not {value!r:.60}")
    if not low <= value <= high or (open_low and value == low):
        above = "above" if open_low else "at least"
        raise SamplingError(name, f"must be {above} {low} and at most {high}, not {value}")


def _check_bias(bias: Mapping[int, float]) -> None:
    if len(bias) > MAX_LOGIT_BIAS:
        raise SamplingError("logit_bias", f"at most {MAX_LOGIT_BIAS} tokens are allowed")
    for token, value in bias.items():
        _whole("logit_bias", token, 0, 2**31 - 1)
        _number("logit_bias", value, -100.0, 100.0)
