"""Spells bad words as tokens: as they are at the beginning of a text and behind a space."""

from collections.abc import Sequence
from dataclasses import replace

from .sampling import SamplingParams
from .tokenizer import Tokenizer


def with_spelled_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with `bad_words_token_ids`. Raises SamplingError for too many tokens."""
    if not params.bad_words:
        return params
    return replace(params, bad_words_token_ids=spell(params.bad_words, tokenizer))


def spell(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word without a space before it, and with one where that is spelled differently.

    vLLM leaves the latter out where it has more or fewer tokens; the word then appears.
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
