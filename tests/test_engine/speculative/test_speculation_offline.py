"""Speculation through the offline API, on the demo model: text, grammars, and how it is set up."""

import json
from functools import cache
from typing import Any

import pytest

from headrace_common.text.checkpoint import demo_folder
from headrace_engine import LLM, SamplingParams, StructuredOutputsParams
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.core.speculative_stats import SpeculationStats
from headrace_engine.serving.settings import EngineSettings

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_blocks": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "threads": 1,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"enum": ["Ann", "Ben"]}, "minItems": 3, "maxItems": 6},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 4},
    },
    "required": ["names", "ages"],
    "additionalProperties": False,
}
PROMPT = "one two three four, one two three four, one two"
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60),
    SamplingParams(temperature=0.8, max_tokens=60, seed=3, stop=["e "]),
    SamplingParams(
        temperature=0.0,
        max_tokens=150,
        structured_outputs=StructuredOutputsParams(json=json.dumps(SCHEMA)),
    ),
    SamplingParams(
        temperature=1.0,
        max_tokens=150,
        seed=5,
        n=2,
        structured_outputs=StructuredOutputsParams(json=json.dumps(SCHEMA)),
    ),
    SamplingParams(
        temperature=1.0,
        max_tokens=40,
        seed=6,
        structured_outputs=StructuredOutputsParams(regex=r"(ab|ba){3,8}\.(x|yy){2,6}"),
        logprobs=2,
    ),
    SamplingParams(temperature=0.7, max_tokens=40, seed=8, bad_words=["two", "the"]),
    SamplingParams(temperature=0.7, max_tokens=40, seed=9, prompt_logprobs=1),
]


SPECULATIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False},
    "draft model": {"model": str(demo_folder()), "num_speculative_tokens": 2, "adaptive": False},
    "adaptive": {"method": "ngram"},
}


@cache
def answers(name: str) -> tuple[list[str], SpeculationStats | None]:
    llm = LLM(str(demo_folder()), speculative_config=SPECULATIONS[name], **OPTIONS)
    outputs = llm.generate([PROMPT] * len(PARAMS), PARAMS, use_tqdm=False)
    texts = [choice.text for output in outputs for choice in output.outputs]
    return texts, llm.llm_engine.model.engine.stats().speculation


@pytest.mark.parametrize("name", ["ngram", "draft model", "adaptive"])
def test_answers_with_and_without_grammars_stay_the_same(name: str) -> None:
    (found, stats), (plain, _) = answers(name), answers("none")
    assert found == plain
    assert stats is not None
    if name != "adaptive":
        assert stats.accepted_tokens > 20


def test_a_draft_model_drafts_only_tokens_that_the_grammar_allows() -> None:
    """The draft model is the target: only stops and the ends of outputs make drafts void."""
    _, stats = answers("draft model")
    assert stats is not None and stats.accepted_tokens > 0.9 * stats.draft_tokens


def test_the_setting_is_vllms_json() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3}'
    settings = EngineSettings(model="m", speculative_config=json.loads(text))
    assert settings.engine_config().speculative_config == SpeculativeConfig(
        method="ngram", num_speculative_tokens=7, prompt_lookup_max=3, prompt_lookup_min=2
    )
    assert EngineSettings(model="m").engine_config().speculative_config is None


def test_a_wrong_setting_names_its_field() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config\.method "):
        LLM(str(demo_folder()), speculative_config={"method": "eagle"}, **OPTIONS)
