"""Encodes bad words as tokens: as at the beginning of a text, and as after a space."""

from collections.abc import Sequence
from dataclasses import replace

from ..sampling.params import SamplingParams
from .tokenizer import Tokenizer


def with_spelled_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with `bad_words_token_ids`. Raises SamplingError for too many tokens."""
    if not params.bad_words:
        return params
    return replace(params, bad_words_token_ids=spell(params.bad_words, tokenizer))


def spell(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word without a space before it, and with one if that differs.

    vLLM omits the latter if it has another number of tokens; the word can then appear.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = _encode(tokenizer, word.lstrip())
        spaced = _encode(tokenizer, " " + word.lstrip())
        found.append(plain)
        if spaced[-len(plain) :] != plain:
            found.append(spaced)
    return tuple(ids for ids in found if ids)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
