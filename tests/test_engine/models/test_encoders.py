"""Encoders that embed: a step computes whole prompts, and the vectors equal those of
transformers."""

import json
from pathlib import Path

import numpy as np
import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.errors import CheckpointError, ConfigError, RequestError
from headrace_engine.core.step_plan import SchedulerOutput, StepResult
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models.encoder import encoder_families
from headrace_engine.models.encoder.transformers_encoder import group_by_length
from headrace_engine.offline.llm import LLM
from headrace_testing.embedders import (
    ENCODERS,
    POSITIONS,
    embed,
    embedding_request,
    hidden_states,
    normalized,
    save_embedder,
)
from headrace_testing.engines import cpu_backends, engine_config, make_runner, request

# Prompts of different lengths, one as long as the model has positions; some contain ids of padding
# tokens.
PROMPTS = [
    [5, 9, 4, 77, 31],
    list(range(3, 3 + POSITIONS)),
    [200, 0, 1] * 6,
    [8],
    [7, 6] * 20,
    list(range(40, 76)),
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(tmp_path_factory.mktemp("bert"), "bert", "mean_tokens")


def test_every_encoder_of_texts_has_a_test_checkpoint() -> None:
    families = encoder_families.ENCODERS.items()
    texts = {name for name, family in families if not family.dual and not family.of_tokens}
    assert ENCODERS.keys() == texts


@pytest.mark.parametrize("family", sorted(ENCODERS))
def test_vectors_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    cls = family in ("roberta", "xlm-roberta")
    folder = save_embedder(tmp_path, family, "cls_token" if cls else "mean_tokens")

    # A step takes several prompts; the longest prompt alone exceeds the budget of a step.
    vectors = embed(folder, PROMPTS, max_num_batched_tokens=100, attention_backend="auto")

    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        states = hidden_states(folder, prompt)
        expected = normalized(states[0] if cls else states.mean(dim=0))
        np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize("backend", cpu_backends())
def test_async_scheduling_and_few_blocks_change_no_vector(bert: Path, backend: str) -> None:
    plain = embed(bert, PROMPTS, attention_backend=backend)

    tight = embed(
        bert, PROMPTS, attention_backend=backend, async_scheduling=True, num_blocks=POSITIONS // 4
    )

    np.testing.assert_allclose(tight, plain, atol=1e-6)
    wanted = normalized(hidden_states(bert, PROMPTS[2]).mean(dim=0))
    np.testing.assert_allclose(tight[2], wanted, atol=1e-5)


def test_prompts_are_neither_chunked_nor_cached(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[tuple[int, int]]] = []
    config = engine_config(bert, max_num_batched_tokens=50)
    runner = ModelRunner(config)
    engine = Engine(config, runner)
    lengths = [30, 30, 30, POSITIONS, 10]
    for index, length in enumerate(lengths):
        engine.add_request(embedding_request(str(index), [9] * length))
    execute = runner.execute

    def watched(scheduler_output: SchedulerOutput) -> StepResult:
        seen.append([(item.start, item.length) for item in scheduler_output.scheduled])
        return execute(scheduler_output)

    monkeypatch.setattr(runner, "execute", watched)
    while engine.has_work:
        engine.step()

    assert seen == [[(0, 30)], [(0, 30)], [(0, 30)], [(0, POSITIONS)], [(0, 10)]]


def test_waiting_prompts_share_a_step_within_its_budget(bert: Path) -> None:
    engine = Engine(engine_config(bert), make_runner(bert))
    for index in range(5):
        engine.add_request(embedding_request(str(index), [9] * 20))

    assert [len(engine.step()) for _ in range(2)] == [3, 2]


def test_prompts_of_similar_length_are_padded_together() -> None:
    assert group_by_length([8, 100, 80, 7, 70, 8]) == [[1, 2], [4], [0, 5, 3]]
    assert group_by_length([]) == []


def test_too_long_prompts_and_text_generation_are_refused(bert: Path) -> None:
    engine = Engine(engine_config(bert), make_runner(bert))

    with pytest.raises(RequestError, match=f"{POSITIONS + 1} tokens, but the context is"):
        engine.add_request(embedding_request("long", [7] * (POSITIONS + 1)))
    with pytest.raises(RequestError, match="makes embeddings"):
        engine.add_request(request("text", [4], SamplingParams()))


def test_the_context_is_the_number_of_positions(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, "roberta", None)

    assert make_runner(folder).max_model_len == POSITIONS  # two more positions are for padding
    with pytest.raises(ConfigError, match=rf"129 is above .* \({POSITIONS}\)"):
        make_runner(folder, max_model_len=POSITIONS + 1)

    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    assert make_runner(folder).max_model_len == 64
    assert make_runner(folder, max_model_len=POSITIONS).max_model_len == POSITIONS


def test_without_modules_json_the_offline_api_pools_the_first_token(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, "xlm-roberta", None)
    llm = LLM(str(folder), dtype="float32", device="cpu")

    (output,) = llm.embed([{"prompt_token_ids": [5, 9]}], use_tqdm=False)

    expected = normalized(hidden_states(folder, [5, 9])[0])
    np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-5)
    with pytest.raises(RequestError, match="makes embeddings"):
        llm.generate("the cat", use_tqdm=False)


def test_settings_that_an_encoder_does_not_support_stop_the_start(bert: Path) -> None:
    with pytest.raises(ConfigError, match="swap_space is 1.0, but BertModel keeps no KV"):
        make_runner(bert, swap_space=1.0)
    with pytest.raises(ConfigError, match="kv_cache_dtype is fp8, but BertModel keeps no KV"):
        make_runner(bert, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 needs one of the native"):
        make_runner(bert, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="enable_lora needs the native"):
        make_runner(bert, enable_lora=True)
    with pytest.raises(ConfigError, match="writes no text: set task embed"):
        make_runner(bert, task="generate")


def test_missing_weights_are_named_except_those_of_the_classifier(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_embedder(tmp_path, "bert", "cls_token")
    path = folder / "model.safetensors"
    weights = {name: part for name, part in load_file(path).items() if "pooler" not in name}
    save_file(weights, path, metadata={"format": "pt"})
    assert len(embed(folder, [[5, 9]])) == 1

    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing keys: encoder.layer.0.output.dense.weight"):
        make_runner(folder)
