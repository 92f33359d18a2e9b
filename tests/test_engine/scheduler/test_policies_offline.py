"""Policies through the offline API, on a tiny model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.errors import ConfigError, RequestError
from headrace_engine.offline.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS: Any = [{"prompt_token_ids": [5 + k, 6, 7]} for k in range(3)]


def load(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        attention_backend="reference",
        skip_tokenizer_init=True,
        num_blocks=64,
        max_num_seqs=1,
        **options,
    )


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


def test_every_policy_gives_the_same_tokens(folder: Path) -> None:
    expected = [one.outputs[0].token_ids for one in load(folder).generate(PROMPTS, GREEDY)]
    for policy in ("priority", "sjf", "fair", "deadline"):
        given: dict[str, Any] = {"priority": [1, 0, -1], "tenant": ["a", "b", "a"], "timeout": 600}
        outputs = load(folder, policy=policy).generate(PROMPTS, GREEDY, **given)
        assert [one.outputs[0].token_ids for one in outputs] == expected


def test_a_late_request_says_that_its_deadline_is_over(folder: Path) -> None:
    llm = load(folder, policy="deadline", policy_options={"margin": 0})
    late, in_time = llm.generate(PROMPTS[:2], GREEDY, timeout=[0.0, 600.0])
    assert (late.outputs[0].finish_reason, late.outputs[0].token_ids) == ("abort", [])
    assert late.outputs[0].stop_reason == "its deadline is over"
    assert late.finished and in_time.outputs[0].finish_reason == "length"


def test_lists_must_be_as_long_as_the_prompts(folder: Path) -> None:
    llm = load(folder)
    for name, values in (("priority", [1]), ("tenant", ["a", "b"]), ("timeout", [1.0])):
        given: Any = {name: values}
        with pytest.raises(RequestError, match=f"{name} has {len(values)} entries for 3 prompts"):
            llm.generate(PROMPTS, GREEDY, **given)


def test_a_policy_that_is_not_known_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="policy 'lifo' is unknown"):
        load(folder, policy="lifo")
