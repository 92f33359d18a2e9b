"""Sampling parameters, as the offline API, the gateway and the engine use them.

Only the standard library, so that the engine's core needs nothing else. Names and defaults are
vLLM's, so that scripts can be moved by changing an import.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from types import MappingProxyType
from typing import Literal

from ..structured.errors import SamplingError as SamplingError
from ..structured.structured import StructuredOutputsParams
from .thinking import ThinkingFormat

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_ALLOWED_TOKEN_IDS = 65_536
# Log probabilities of a prompt: its tokens times the alternatives of each.
MAX_PROMPT_LOGPROB_ENTRIES = 2**19

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, checked when created.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps every token. `logprobs` None returns none, 0
    the chosen token's, k > 0 also those of the k most likely tokens. `max_tokens` None generates up
    to the model's context. `stop` strings are matched on the text by the detokenising process; the
    engine core sees only ids. Without a `seed` the caller draws one, so that a request that moves
    to another engine continues with the same random numbers.

    `structured_outputs` is what the output must match. `allowed_token_ids` None allows all.
    `bad_words` never appear in the output: the process with the tokenizer encodes them as
    `bad_words_token_ids`, which the engine reads. `prompt_logprobs` None returns none, k those of
    each prompt token and of the k most likely tokens at its position.

    `thinking_token_budget` is the most tokens of reasoning (None: any number): after that many the
    reasoning is closed. `thinking_format` says how the model marks its reasoning.

    `best_of` choices run, and the `n` with the highest summed log probability are returned. With
    `use_beam_search` that many beams are searched instead, as transformers does. Then the score is
    divided by the output's length to the power of `length_penalty`. `early_stopping` True ends the
    search with the first `best_of` finished beams, "never" only when no better one is possible.

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
    structured_outputs: StructuredOutputsParams | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    thinking_format: ThinkingFormat | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

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
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.thinking_token_budget is not None:
            _whole("thinking_token_budget", self.thinking_token_budget, 0, 2**31 - 1)
        _check_branches(self)
        _check_allowed(self.allowed_token_ids)
        _check_bad_words(self.bad_words, self.bad_words_token_ids)
        if self.structured_outputs is not None and self.allowed_token_ids is not None:
            raise SamplingError(
                "allowed_token_ids", "cannot be combined with structured_outputs: leave one out"
            )

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
    def branches(self) -> int:
        """The number of choices that run; it exceeds `n` if the best of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def answers_at_end(self) -> bool:
        """Whether the answer is known only when all choices have ended."""
        return self.use_beam_search or self.branches > self.n

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def adjusts_logits(self) -> bool:
        """Whether any logits are changed before a token is sampled."""
        return (
            self.min_tokens > 0
            or self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.structured_outputs is not None
            or self.allowed_token_ids is not None
            or self.thinking_token_budget is not None
            or bool(self.logit_bias or self.bad_words_token_ids)
        )

    def for_engine(self, *, seed: int, max_tokens: int | None, min_tokens: int) -> "SamplingParams":
        """Returns these parameters with other limits, and without stop strings.

        Checks nothing again: every request goes this way. The caller keeps `min_tokens` at most
        `max_tokens`.
        """
        changed = {"seed": seed, "max_tokens": max_tokens, "min_tokens": min_tokens, "stop": ()}
        made = object.__new__(SamplingParams)
        for name in _FIELDS:
            object.__setattr__(
                made, name, changed[name] if name in changed else getattr(self, name)
            )
        return made

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises SamplingError if a field has a token id that is not below `vocab_size`."""
        for name, ids in (
            ("logit_bias", self.logit_bias.keys()),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", chain.from_iterable(self.bad_words_token_ids)),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise SamplingError(name, f"token id {token} is not below {vocab_size}")


_FIELDS = tuple(field.name for field in fields(SamplingParams))


def _whole(name: str, value: object, low: int, high: int) -> None:
    if type(value) is int and low <= value <= high:
        return  # the usual case: each request is checked twenty times
    if isinstance(value, bool) or not isinstance(value, int):
        raise SamplingError(name, f"must be a whole number, not {value!r:.60}")
    if not low <= value <= high:
        raise SamplingError(name, f"must be between {low} and {high}, not {value}")


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if type(value) is float and low < value <= high:
        return
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


def _check_allowed(ids: Sequence[int] | None) -> None:
    if ids is None:
        return
    if not 0 < len(ids) <= MAX_ALLOWED_TOKEN_IDS:
        raise SamplingError(
            "allowed_token_ids", f"1 to {MAX_ALLOWED_TOKEN_IDS} ids are allowed, not {len(ids)}"
        )
    for token in ids:
        _whole("allowed_token_ids", token, 0, 2**31 - 1)


def _check_bad_words(words: Sequence[str], spelled: Sequence[Sequence[int]]) -> None:
    if isinstance(words, str) or len(words) > MAX_BAD_WORDS:
        raise SamplingError("bad_words", f"must be a list of at most {MAX_BAD_WORDS} words")
    for word in words:
        if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise SamplingError(
                "bad_words",
                f"each must be a text of 1 to {MAX_BAD_WORD_CHARS} characters, not {word!r:.60}",
            )
    if len(spelled) > 2 * MAX_BAD_WORDS:  # with a space before it and without
        raise SamplingError("bad_words", "too many spellings")
    for ids in spelled:
        if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
            raise SamplingError(
                "bad_words", f"each may have at most {MAX_BAD_WORD_TOKENS} tokens, not {len(ids)}"
            )
        for token in ids:
            _whole("bad_words", token, 0, 2**31 - 1)


def _check_branches(params: SamplingParams) -> None:
    if params.best_of is not None:
        _whole("best_of", params.best_of, 1, MAX_CHOICES)
        if params.best_of < params.n:
            raise SamplingError("best_of", f"must not be less than n ({params.n})")
    _number("length_penalty", params.length_penalty, -10.0, 10.0)
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise SamplingError("early_stopping", 'must be true, false or "never"')
    if params.prompt_logprobs is not None and params.answers_at_end:
        raise SamplingError("prompt_logprobs", "cannot be combined with beam search or best_of")
    if params.use_beam_search:
        _check_beams(params)
        return
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(params, name) != neutral:
            raise SamplingError(name, "is for beam search: set use_beam_search or leave it out")


def _check_beams(params: SamplingParams) -> None:
    """Refuses parameters that change logits or draw tokens: only the model scores beams."""
    if params.temperature not in (0.0, 1.0):
        raise SamplingError("temperature", "must be 0 or left out with use_beam_search")
    neutral: dict[str, object] = {
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "structured_outputs": None,
        "allowed_token_ids": None,
        "thinking_token_budget": None,
    }
    changed = [name for name, value in neutral.items() if getattr(params, name) != value]
    changed += [name for name in ("logit_bias", "stop", "bad_words") if getattr(params, name)]
    if params.top_k > 0:
        changed.append("top_k")
    if changed:
        raise SamplingError(changed[0], "has no meaning for beam search: leave one of them out")
