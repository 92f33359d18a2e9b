"""Allowed tokens and bad words: with vLLM's meaning, row by row, and as text in the offline API."""

from typing import Any

import pytest
import torch

from headrace_common.sampling.params import SamplingError
from headrace_common.text.bad_words import spell
from headrace_common.text.checkpoint import demo_folder
from headrace_common.text.tokenizer import Tokenizer
from headrace_engine import LLM, SamplingParams
from headrace_engine.core.errors import RequestError
from headrace_engine.core.request import EngineRequest, Sequence
from headrace_engine.core.step_plan import SampleRow
from headrace_engine.sampling.logits_processors import adjust

VOCAB = 40


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        str(demo_folder()), dtype="float32", device="cpu", num_blocks=128, max_num_seqs=8, threads=1
    )


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Tokenizer:
    return llm.get_tokenizer()


def row(output: tuple[int, ...] = (), ahead: tuple[int, ...] = (), **options: Any) -> SampleRow:
    request = EngineRequest(
        request_id="r", prompt_token_ids=(1, 2), params=SamplingParams(**options), seed=0
    )
    return SampleRow(Sequence(request, 0, [1, 2, *output]), ahead)


def finite(*rows: SampleRow) -> list[set[int]]:
    """The tokens that each row may still sample."""
    logits = torch.zeros(len(rows), VOCAB)
    adjust(logits, rows, frozenset({0}))
    return [set(torch.isfinite(one).nonzero().flatten().tolist()) for one in logits]


EVERY = set(range(VOCAB))


def test_only_allowed_tokens_are_left_to_their_row() -> None:
    found = finite(row(), row(allowed_token_ids=[3, 39]), row(allowed_token_ids=[5]), row())

    assert found == [EVERY, {3, 39}, {5}, EVERY]


@pytest.mark.parametrize(
    ("output", "ahead", "banned"),
    [
        ((), (), {9}),
        ((4,), (), {5, 9}),
        ((6, 4), (), {5, 9}),
        ((4, 6), (), {9}),
        ((4, 5), (), {9}),
        ((7, 8), (), {9, 10}),
        ((7,), (8,), {9, 10}),
        ((), (7, 8), {9, 10}),
        ((4,), (6,), {9}),
        ((6,), (4,), {5, 9}),
    ],
)
def test_a_bad_word_may_not_be_completed(
    output: tuple[int, ...], ahead: tuple[int, ...], banned: set[int]
) -> None:
    """Bad words of one, two and three tokens; a word that begins in the prompt is not matched."""
    words = ((9,), (4, 5), (7, 8, 10), (2, 11))

    (found,) = finite(row(output, ahead, bad_words_token_ids=words))

    assert found == EVERY - banned


def test_words_are_spelled_at_the_beginning_and_after_a_space(tokenizer: Tokenizer) -> None:
    found = spell(["mill", " water"], tokenizer)

    texts = [tokenizer.decode(ids) for ids in found]
    assert set(texts) == {"mill", " mill", "water", " water"}


def test_bad_words_do_not_appear(llm: LLM) -> None:
    prompt = "Once upon a time"
    free = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    text = free[0].outputs[0].text
    words = [word.strip(",.") for word in text.split() if len(word) > 3][:3]
    assert words

    held = llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=12, bad_words=words), use_tqdm=False
    )

    assert not [word for word in words if f" {word} " in f" {held[0].outputs[0].text} "]
    assert held[0].outputs[0].text != text


def test_only_allowed_tokens_come_out(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.0, max_tokens=20, allowed_token_ids=[300, 301, 302], seed=1
    )

    output = llm.generate("Hello", params, use_tqdm=False)[0].outputs[0]

    assert set(output.token_ids) <= {300, 301, 302}


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": [True]},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words": ["x" * 1000]},
        {"bad_words_token_ids": [()]},
        {"bad_words_token_ids": [(1,) * 100]},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": -1},
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(SamplingError, match=name.removesuffix("_token_ids")):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options", [{"allowed_token_ids": [10**6]}, {"bad_words_token_ids": [(5, 10**6)]}]
)
def test_ids_beyond_the_vocabulary_are_refused(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="not below"):
        llm.generate("Hello", SamplingParams(**options), use_tqdm=False)
