"""Limits on tokens of reasoning: on states and cursors, and on the demo model.

The demo model's vocabulary has `<think>` and `</think>` as tokens. Harmony's markers are spelled
with several.
"""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.sampling.params import SamplingError, SamplingParams
from headrace_common.sampling.thinking import ThinkingBegin, ThinkingFormat
from headrace_common.structured.structural_format import Pattern
from headrace_common.structured.structural_tag import (
    ReasoningBegin,
    ReasoningFormat,
    StructuralTag,
)
from headrace_common.structured.structured import StructuredOutputsParams
from headrace_common.text.checkpoint import demo_folder
from headrace_common.text.tokenizer import Tokenizer
from headrace_common.wire.messages import GenerateRequest, decode_request, encode_request
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.errors import RequestError
from headrace_engine.core.request import EngineRequest
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.core.thinking import ThinkingBudget, ThinkingCursor
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.structured_output.compiler import GrammarCompiler

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_blocks": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "threads": 1,
}
INSIDE = ThinkingFormat(opening="<think>", closing="</think>", begin=ThinkingBegin.INSIDE)
OPEN = ThinkingFormat(opening="<think>", closing="</think>")
HARMONY = ThinkingFormat(
    opening="<|channel|>analysis<|message|>",
    closing="<|end|>",
    ending="<|end|><|start|>assistant<|channel|>final<|message|>",
    again=True,
    answer="<|channel|>final<|message|>",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(demo_folder())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 2048, frozenset((0, 2)))


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(EngineConfig(model=str(demo_folder()), **OPTIONS))


def letters(budget: int, form: ThinkingFormat) -> ThinkingBudget:
    """A vocabulary in which each character is a token."""
    return ThinkingBudget(budget, form, tuple(map(ord, form.ending)), chr)


def written(budget: ThinkingBudget, wish: str) -> str:
    """The output of a model that wants to write this text, as far as it is allowed."""
    cursor, ids = ThinkingCursor(budget), list[int]()
    wanted = list(map(ord, wish))
    while wanted:
        forced = cursor.forced(ids, 0, len(ids), ())
        ids.append(wanted.pop(0) if forced is None else forced)
    return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("form", "budget", "wish", "expected"),
    [
        (INSIDE, 0, "abc", "</think>abc"),
        (INSIDE, 2, "abc", "ab</think>c"),
        (INSIDE, 20, "ab</think>cdefghijklmnopqrstu", "ab</think>cdefghijklmnopqrstu"),
        (INSIDE, 10, "ab</think>cd", "ab</think>cd"),
        (OPEN, 0, "<think>ab", "<think></think>ab"),
        (OPEN, 1, "\n <think>ab", "\n <think>a</think>b"),
        (OPEN, 1, "no <think>ab", "no <think>ab"),
        (OPEN, 0, "<thi no", "<thi no"),
        (
            HARMONY,
            2,
            "<|channel|>analysis<|message|>abc",
            "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>final<|message|>c",
        ),
        # Messages count together, with their ends.
        (
            HARMONY,
            8,
            "<|channel|>analysis<|message|>a<|end|><|channel|>analysis<|message|>b",
            "<|channel|>analysis<|message|>a<|end|><|channel|>analysis<|message|>"
            "<|end|><|start|>assistant<|channel|>final<|message|>b",
        ),
    ],
)
def test_reasoning_is_closed_when_its_tokens_are_used_up(
    form: ThinkingFormat, budget: int, wish: str, expected: str
) -> None:
    assert written(letters(budget, form), wish) == expected


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "a", "\n", "<"]), max_size=8),
    form=st.sampled_from([INSIDE, OPEN]),
    budget=st.integers(0, 12),
    data=st.data(),
)
def test_the_state_depends_on_the_tokens_and_not_on_drafts(
    text: Sequence[str], form: ThinkingFormat, budget: int, data: st.DataObject
) -> None:
    limit = letters(budget, form)
    ids = list(map(ord, written(limit, "".join(text))))
    cursor = ThinkingCursor(limit)
    for _ in range(6):
        end = data.draw(st.integers(0, len(ids)))
        ahead = tuple(map(ord, data.draw(st.sampled_from(["", "</think>", "a<", "<think>"]))))
        fresh = ThinkingCursor(limit)
        known = [*ids[:end], *ahead]
        assert cursor.forced(ids, 0, end, ahead) == fresh.forced(known, 0, len(known), ())


def test_the_format_survives_the_wire() -> None:
    sampling = SamplingParams(thinking_token_budget=3, thinking_format=HARMONY, seed=1)
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt_token_ids=(1,),
        sampling=sampling,
        created_ms=1,
        deadline_ms=2,
    )
    assert decode_request(encode_request(request)).sampling == sampling
    with pytest.raises(SamplingError, match="ending must begin with closing"):
        ThinkingFormat(opening="a", closing="b", ending="c")
    with pytest.raises(SamplingError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=-1)


def params(budget: int, *, held: bool, **more: Any) -> SamplingParams:
    tag = StructuralTag(
        Pattern("([a-z]{3} ){6}end"),
        ReasoningFormat("<think>", "</think>", ReasoningBegin.INSIDE, closed=True),
    )
    structured = StructuredOutputsParams(structural_tag=tag.to_json()) if held else None
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 60, **more}
    return SamplingParams(
        thinking_token_budget=budget,
        thinking_format=INSIDE,
        structured_outputs=structured,
        **options,
    )


def request(
    compiler: GrammarCompiler, name: str, one: SamplingParams, resume: Sequence[Sequence[int]] = ()
) -> EngineRequest:
    held = one.structured_outputs
    return EngineRequest(
        request_id=name,
        prompt_token_ids=(9, 10, 11, 12),
        params=one,
        seed=len(name),
        grammar=None if held is None else compiler.compile(held),
        thinking=compiler.thinking.make(one),
        resume=tuple(map(tuple, resume)),
    )


def run(
    runner: ModelRunner, *requests: EngineRequest, **options: Any
) -> dict[tuple[str, int], list[int]]:
    engine = Engine(EngineConfig(model=str(demo_folder()), **{**OPTIONS, **options}), runner)
    found: dict[tuple[str, int], list[int]] = {}
    for each in requests:
        engine.add_request(each)
    while engine.has_work:
        for output in engine.step():
            found.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
    return found


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_model_is_made_to_close_its_reasoning(
    runner: ModelRunner, compiler: GrammarCompiler, tokenizer: Tokenizer, budget: int, held: bool
) -> None:
    one = params(budget, held=held, n=3)
    closing = tokenizer.encode("</think>", add_special_tokens=False)
    outputs = run(runner, request(compiler, "r", one))

    assert len(outputs) == 3 and len(set(map(tuple, outputs.values()))) == 3
    for ids in outputs.values():
        assert ids[budget : budget + len(closing)] == closing
        if held:
            answer = tokenizer.decode(ids[budget + len(closing) :]).strip()
            assert re.fullmatch("([a-z]{3} ){6}end", answer), answer


@pytest.mark.parametrize("held", [False, True])
def test_a_resumed_output_closes_its_reasoning_at_the_same_token(
    runner: ModelRunner, compiler: GrammarCompiler, held: bool
) -> None:
    one = params(7, held=held)
    (whole,) = run(runner, request(compiler, "r", one)).values()
    for cut in (1, 6, 7, 8, 9, 15):
        (rest,) = run(runner, request(compiler, "r", one, [whole[:cut]])).values()
        assert whole[:cut] + rest == whole


def test_drafts_and_preemption_change_nothing(compiler: GrammarCompiler) -> None:
    requests = [
        request(compiler, "r" * count, params(9, held=count % 2 == 0, max_tokens=90))
        for count in range(1, 7)
    ]
    ngrams = SpeculativeConfig(
        method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3
    )
    changes: list[dict[str, Any]] = [
        {},
        {"speculative_config": ngrams},
        {"num_blocks": 9, "max_model_len": 128},
        {"async_scheduling": True},
    ]
    outputs = []
    for options in changes:
        config = EngineConfig(model=str(demo_folder()), **{**OPTIONS, **options})
        outputs.append(run(ModelRunner(config), *requests, **options))
    assert all(each == outputs[0] for each in outputs[1:])


def test_a_limit_without_markers_or_tokenizer_is_refused(
    runner: ModelRunner, compiler: GrammarCompiler
) -> None:
    with pytest.raises(RequestError, match="give thinking_format"):
        compiler.thinking.make(SamplingParams(thinking_token_budget=3))
    bare = EngineRequest(
        request_id="r", prompt_token_ids=(1,), params=params(3, held=False), seed=1
    )
    with pytest.raises(RequestError, match="thinking_token_budget needs a tokenizer"):
        run(runner, bare)
