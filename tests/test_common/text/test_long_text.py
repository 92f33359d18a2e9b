"""A long text that is tokenised in pieces gets the same ids as the whole text."""

import random
import tracemalloc

import pytest
import tokenizers
from tokenizers import processors

from headrace_common.text import long_text
from headrace_common.text.checkpoint import DEMO_MODEL
from headrace_common.text.long_text import MOST_CHARS, NoCut
from headrace_common.text.tokenizer import Tokenizer
from headrace_testing.tokenizers import (
    CORPUS,
    SPECIALS,
    byte_level_tokenizer,
    harmony_tokenizer,
    metaspace_tokenizer,
)

WORDS = [*" ".join(CORPUS).split(), *SPECIALS, "isn't", "\n", "\n\n  ", "\t", "a" * 900, "1,234.5"]


def text_of(seed: int, chars: int) -> str:
    rng = random.Random(seed)
    text = ""
    while len(text) < chars:
        words = rng.choices(WORDS, k=100)
        text += "".join(word + rng.choice([" ", " ", "", ", ", "  "]) for word in words)
    return text


@pytest.fixture(params=[byte_level_tokenizer, harmony_tokenizer, metaspace_tokenizer])
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    made: tokenizers.Tokenizer = request.param()
    return made


def with_ends(backend: tokenizers.Tokenizer) -> Tokenizer:
    """Adds a token before and one after every text."""
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return Tokenizer(backend, special_tokens={}, eos_token_ids=())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_pieces_have_the_ids_of_the_whole(
    backend: tokenizers.Tokenizer, seed: int, special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_text, "PIECE_CHARS", 2000)
    monkeypatch.setattr("headrace_common.text.tokenizer.PIECE_CHARS", 2000)
    tokenizer = with_ends(backend)
    text = text_of(seed, 50_000)

    ids = tokenizer.encode(text, add_special_tokens=special)

    assert ids == backend.encode(text, add_special_tokens=special).ids


def test_a_long_text_is_really_cut() -> None:
    backend = byte_level_tokenizer()
    text = text_of(1, 400_000)
    cut = list(long_text.pieces(text, lambda piece: list(backend.encode(piece).ids)))

    assert "".join(cut) == text
    assert len(cut) > 4 and max(map(len, cut)) <= MOST_CHARS


def test_a_text_over_the_limit_is_not_read_to_its_end() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), special_tokens={}, eos_token_ids=())
    text = "word " * 200_000

    ids = tokenizer.encode(text, most=10)

    assert 10 < len(ids) < len(tokenizer.encode(text)) / 2


def test_a_long_text_is_not_read_on_if_the_check_between_its_pieces_fails() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), special_tokens={}, eos_token_ids=())
    text, checks = "word " * 200_000, list[int]()

    def check() -> None:
        checks.append(1)
        if len(checks) == 3:
            raise InterruptedError

    for encode in (tokenizer.encode, tokenizer.encode_protected):
        checks.clear()
        with pytest.raises(InterruptedError):
            encode(text, check=check)
        assert len(checks) == 3


def test_a_word_of_unlimited_length_is_refused() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), special_tokens={}, eos_token_ids=())
    with pytest.raises(NoCut, match="blanks"):
        tokenizer.encode("a" * (MOST_CHARS + 1))


def test_special_tokens_that_a_user_writes_take_little_memory() -> None:
    """At most 15 bytes for each character: what stands for them, and all ids, are few objects."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    text = "<|im_end|>" * 60_000
    tokenizer.encode_protected(tokenizer.protect("<|im_end|>"))  # makes what is made once
    tracemalloc.start()
    try:
        ids = tokenizer.encode_protected(tokenizer.protect(text))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tokenizer.decode(ids) == text
    assert peak < 15 * len(text)


def test_many_short_texts_share_their_ids() -> None:
    """Ids that are objects of their own take 40 bytes each, with their place in the list."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    tokenizer.encode("the mill " * 300)  # makes what is made once
    tracemalloc.start()
    try:
        texts = [tokenizer.encode("the mill " * 300) for _ in range(200)]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 16 * sum(map(len, texts))
