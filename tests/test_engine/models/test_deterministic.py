"""In deterministic mode a request has the same tokens and log probabilities, bit by bit: alone, in
a large batch, in other chunks, with cached prefixes, after a preemption, or resumed on another
engine.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.outputs import TokenLogprobs
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models import native
from headrace_engine.serving.settings import EngineSettings
from headrace_testing.checkpoints import VOCAB, save_checkpoint
from headrace_testing.engines import Output, cpu_backends, engine_config, request, run

OUTPUT = 4
# Attention splits keys into ranges of 512; some prompts need several, and end inside one.
LENGTHS = (1, 5, 17, 40, 63, 64, 90, 33, 2, 50, 21, 530, 8, 12, 70, 1030)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2},
)
Results = dict[str, Output]
Bits = tuple[list[int], list[TokenLogprobs]]


def workload() -> list[EngineRequest]:
    """64 requests; every fourth begins with the same 80 tokens."""
    rng = random.Random(7)
    shared = [rng.randrange(3, VOCAB) for _ in range(80)]
    made = []
    for index in range(64):
        prompt = [rng.randrange(3, VOCAB) for _ in range(LENGTHS[index % len(LENGTHS)])]
        params = SamplingParams(
            max_tokens=OUTPUT, ignore_eos=True, logprobs=2, **SAMPLING[index % len(SAMPLING)]
        )
        prefix = shared if index % 4 == 0 else []
        made.append(request(str(index), prefix + prompt, params, seed=index))
    return made


def serve(runner: ModelRunner, folder: Path, work: list[EngineRequest], **options: Any) -> Results:
    engine = Engine(config(folder, **options), runner)
    return {name: output for (name, _), output in run(engine, work).items()}


def config(folder: Path, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "attention_backend": "auto",
        "deterministic": True,
        "enable_prefix_caching": False,
        "block_size": 16,
        "num_blocks": 1600,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    }
    return engine_config(folder, **{**defaults, **options})


def bits(results: Results) -> dict[str, Bits]:
    return {name: (one.token_ids, one.logprobs) for name, one in results.items()}


@pytest.mark.skipif("cpu" not in cpu_backends(), reason="no native kernels")
@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        ("qwen2", "bfloat16", "none"),
        ("qwen2", "float32", "none"),
        ("qwen2", "bfloat16", "int8"),
        ("deepseek-v3", "bfloat16", "none"),
    ],
)
def test_a_request_has_the_same_bits_in_any_batch(
    name: str, dtype: str, quantization: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, name, max_position_embeddings=2048)
    options = {"dtype": dtype, "quantization": quantization}
    runner = ModelRunner(config(folder, threads=2, **options))
    work = workload()
    alone: Results = {}
    for one in work:
        alone |= serve(runner, folder, [one])
    expected = bits(alone)
    assert bits(serve(runner, folder, work)) == expected
    assert bits(serve(runner, folder, work, max_num_batched_tokens=75)) == expected
    cached = serve(runner, folder, [*work, *again(work)], enable_prefix_caching=True)
    assert any(one.cached_tokens for one in cached.values())
    assert {name: bits(cached)[name] for name in expected} == expected
    assert {name: bits(cached)[f"{name} again"] for name in expected} == expected
    # Another engine, with another number of threads, and too few blocks for all requests.
    few_blocks = {"block_size": 4, "num_blocks": 300, "watermark": 0.0}
    other = ModelRunner(config(folder, threads=3, **few_blocks, **options))
    crowded = Engine(config(folder, **few_blocks), other)
    assert bits({name: one for (name, _), one in run(crowded, work).items()}) == expected
    assert crowded.stats().preemptions > 0
    half_done = [replace(one, resume=half(expected, one)) for one in work]
    resumed = serve(other, folder, half_done, **few_blocks)
    for name, (tokens, logprobs) in bits(resumed).items():
        assert [*half_of(expected, name), *tokens] == expected[name][0]
        assert logprobs == expected[name][1][OUTPUT // 2 :]


def again(work: list[EngineRequest]) -> list[EngineRequest]:
    return [replace(one, request_id=f"{one.request_id} again") for one in work]


def half(expected: Any, one: EngineRequest) -> tuple[tuple[int, ...]]:
    return (half_of(expected, one.request_id),)


def half_of(expected: Any, name: str) -> tuple[int, ...]:
    return tuple(expected[name][0][: OUTPUT // 2])


def test_models_without_a_deterministic_path_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(native, "_is_fused", lambda *_: False)
    with pytest.raises(ConfigError, match="deterministic on a CPU needs a model whose whole step"):
        ModelRunner(config(folder))
    with pytest.raises(ConfigError, match="GPTNeoXForCausalLM would be served"):
        ModelRunner(config(save_checkpoint(tmp_path / "neox", "gpt_neox")))
    with pytest.raises(ConfigError, match="deterministic needs attention_backend cpu"):
        ModelRunner(config(folder, attention_backend="reference"))


def test_deterministic_mode_is_a_setting_of_the_engine() -> None:
    assert EngineSettings(model="m", deterministic=True).engine_config().deterministic
    assert not EngineSettings(model="m").engine_config().deterministic
