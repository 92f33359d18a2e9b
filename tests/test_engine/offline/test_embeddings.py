"""Embeddings of tiny checkpoints against transformers' own hidden states."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import PoolingParams
from headrace_engine.core.errors import CheckpointError, ConfigError, RequestError
from headrace_engine.engine.engine import Engine
from headrace_engine.offline.llm import LLM
from headrace_testing.checkpoints import VOCAB, save_checkpoint
from headrace_testing.embedders import (
    embed,
    embedding_request,
    hidden_states,
    normalized,
    save_embedder,
    write_modules,
)
from headrace_testing.engines import cpu_backends, engine_config, make_runner, request

PROMPTS = [[5, 9, 4, 77, 31], list(range(3, 90)), [200] * 17, [8]]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint like Qwen3-Embedding: a model without a head, with modules.json."""
    return save_embedder(tmp_path_factory.mktemp("qwen3"), "qwen3", "lasttoken")


@pytest.mark.parametrize("backend", cpu_backends())
def test_last_token_pooling_equals_transformers(qwen3: Path, backend: str) -> None:
    vectors = embed(qwen3, PROMPTS, attention_backend=backend)

    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        expected = normalized(hidden_states(qwen3, prompt)[-1])
        np.testing.assert_allclose(vector, expected, atol=2e-5)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token"])
def test_prompts_over_several_steps_pool_all_their_tokens(
    tmp_path: Path, mode: str, implementation: str
) -> None:
    folder = save_embedder(tmp_path, "mistral", mode)

    vectors = embed(folder, PROMPTS, max_num_batched_tokens=16, model_implementation=implementation)

    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        states = hidden_states(folder, prompt)
        wanted = states.mean(dim=0) if mode == "mean_tokens" else states[0]
        np.testing.assert_allclose(vector, normalized(wanted), atol=2e-5)


def test_prompts_that_wait_for_memory_count_each_token_once(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, "llama", "mean_tokens")
    prompts = [[i] * 60 for i in range(3, 9)]

    vectors = embed(folder, prompts, num_blocks=32, max_num_batched_tokens=24, watermark=0.0)

    for prompt, vector in zip(prompts, vectors, strict=True):
        expected = normalized(hidden_states(folder, prompt).mean(dim=0))
        np.testing.assert_allclose(vector, expected, atol=2e-5)


def test_a_repeated_beginning_comes_from_the_prefix_cache(qwen3: Path) -> None:
    engine = Engine(engine_config(qwen3), make_runner(qwen3))
    prompt = list(range(3, 80))
    outputs = []

    for name in ("first", "second"):
        engine.add_request(embedding_request(name, prompt))
        while engine.has_work:
            outputs += engine.step()

    first, second = outputs
    assert first.cached_tokens == 0 and second.cached_tokens >= 72
    assert first.embedding is not None and second.embedding is not None
    np.testing.assert_allclose(
        np.frombuffer(first.embedding, "<f4"), np.frombuffer(second.embedding, "<f4"), atol=2e-5
    )


def test_a_generating_checkpoint_can_be_set_to_embed(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen2")
    settings = {"pooling_type": "MEAN", "normalize": False}

    (vector,) = embed(folder, [[4, 5, 6]], task="embed", pooler_config=settings)

    expected = hidden_states(folder, [4, 5, 6]).mean(dim=0).numpy()
    np.testing.assert_allclose(vector, expected, rtol=1e-4, atol=1e-4)


def test_a_shortened_vector_has_length_one(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, "qwen3", "lasttoken", matryoshka_dimensions=[16, 32])

    (vector,) = embed(folder, [[4, 5, 6]], dimensions=16)

    expected = normalized(hidden_states(folder, [4, 5, 6])[-1][:16])
    np.testing.assert_allclose(vector, expected, atol=2e-5)


def test_lengths_that_the_model_was_not_trained_for_are_refused(
    qwen3: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="64 numbers and cannot be shortened"):
        embed(qwen3, [[4]], dimensions=16)
    listed = {"matryoshka_dimensions": [16]}
    with pytest.raises(RequestError, match="24 is not one of 16, 64"):
        embed(qwen3, [[4]], dimensions=24, pooler_config=listed)
    with pytest.raises(RequestError, match="65 is not one of 1 to 64"):
        embed(qwen3, [[4]], dimensions=65, pooler_config={"matryoshka_dimensions": "any"})


def test_requests_for_a_task_that_the_model_does_not_have_are_refused(
    qwen3: Path, tmp_path: Path
) -> None:
    embedder = Engine(engine_config(qwen3), make_runner(qwen3))
    with pytest.raises(RequestError, match="makes embeddings"):
        embedder.add_request(request("a", [4], SamplingParams()))

    folder = save_checkpoint(tmp_path, "llama")
    generator = Engine(engine_config(folder), make_runner(folder))
    with pytest.raises(RequestError, match="makes text"):
        generator.add_request(embedding_request("a", [4]))


def test_a_prompt_may_fill_the_whole_context(qwen3: Path) -> None:
    engine = Engine(engine_config(qwen3, max_model_len=32), make_runner(qwen3, max_model_len=32))

    engine.add_request(embedding_request("whole", [7] * 32))
    with pytest.raises(RequestError, match="33 tokens"):
        engine.add_request(embedding_request("longer", [7] * 33))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooler_config": {"pooling": "MEAN"}}, "unknown field 'pooling'"),
        ({"pooler_config": {"pooling_type": "MAX"}}, "must be one of LAST, MEAN, CLS"),
        ({"pooler_config": {"normalize": 1}}, "normalize must be true or false"),
        ({"pooler_config": {"matryoshka_dimensions": [0]}}, "numbers from 1 to 64"),
    ],
)
def test_invalid_pooler_settings_are_refused_at_start(
    qwen3: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_runner(qwen3, **change)


def test_unknown_modules_are_refused_at_start(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, "qwen3", "lasttoken")
    write_modules(folder, ("Transformer", "Pooling", "Dense"))
    with pytest.raises(ConfigError, match="module 'Dense' is not supported"):
        make_runner(folder)

    (folder / "modules.json").write_text("{}")
    with pytest.raises(CheckpointError, match="must hold a list"):
        make_runner(folder)


def test_an_unknown_pooling_mode_is_refused_at_start(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, "qwen3", "max_tokens")
    with pytest.raises(ConfigError, match="pooling_mode_max_tokens"):
        make_runner(folder)


def test_a_model_with_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, "qwen3", "lasttoken", is_causal=False)
    with pytest.raises(ConfigError, match="attends in both directions"):
        make_runner(folder)


def test_the_vocabulary_size_comes_from_the_checkpoint(qwen3: Path) -> None:
    assert make_runner(qwen3).vocab_size == VOCAB


def test_offline_embeddings_have_vllms_names(qwen3: Path) -> None:
    llm = LLM(str(qwen3), dtype="float32", device="cpu", num_blocks=64)

    outputs = llm.embed(["the cat", {"prompt_token_ids": [5, 9]}], use_tqdm=False)

    assert outputs[1].prompt_token_ids == [5, 9]
    expected = normalized(hidden_states(qwen3, [5, 9])[-1])
    np.testing.assert_allclose(outputs[1].outputs.embedding, expected, atol=2e-5)
    with pytest.raises(RequestError, match="makes embeddings"):
        llm.generate("the cat", use_tqdm=False)
    with pytest.raises(RequestError, match="cannot be shortened"):
        llm.embed("the cat", PoolingParams(dimensions=8), use_tqdm=False)
    assert len(llm.embed("the cat", use_tqdm=False)) == 1
