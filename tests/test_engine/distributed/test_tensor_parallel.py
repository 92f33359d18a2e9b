"""Several ranks give the same tokens as one: for all architectures, all numbers of ranks, and all
operations of the engine on sequences.

Most ranks here are threads with real gloo collectives; one test has them as processes. Left out:
GPUs and NCCL, which need more than one device.
"""

from collections.abc import Callable
from pathlib import Path
from threading import current_thread
from typing import Any, Literal

import pytest
import torch

from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import PoolingParams
from headrace_engine import attention
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.cuda_graphs import cuda_graphs
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes, DecodeRecorder
from headrace_engine.distributed import rank
from headrace_engine.distributed.process import OnEnd
from headrace_engine.engine.engine import Engine
from headrace_engine.kv_cache.memory_budget import Profile
from headrace_engine.layers.float8_weight import Float8Weight
from headrace_engine.layers.layers import PlainLinear
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models import placed_model
from headrace_engine.models.linear import linear_maker
from headrace_engine.offline.embeddings import embed as embed_prompts
from headrace_testing.checkpoints import SHAPES, Reference, save_checkpoint
from headrace_testing.engines import Output, engine_config, greedy, request, run
from headrace_testing.quantized import Format, awq, gptq, save_fp8, save_mxfp4, save_quantized
from headrace_testing.rank_threads import RankThread, close, make_engine
from headrace_testing.recorded_steps import PaddedReference, Replays

LENGTH = 8
# Architectures whose ranks are tested with quantised weights.
QUANTISED = (
    "mistral", "qwen2", "gemma", "gemma3", "smollm3", "olmo2", "granite", "ministral3", "glm",
    "exaone4", "ernie4_5", "seed_oss", "olmo3", "qwen2-moe", "qwen3-moe", "solar-open", "dots1",
    "minimax-m2", "olmoe", "ernie4_5-moe", "hunyuan", "hunyuan-moe", "deepseek-v2",
    "deepseek-v32", "glm4-moe-lite",
)  # fmt: skip

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]


@pytest.mark.proves("ranks")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama", 4),
        ("llama3-rope", 2),
        ("qwen3", 2),
        ("gemma2", 2),
        ("phi3", 2),
        ("glm4", 2),
        ("olmo3", 4),
        ("mixtral", 2),
        ("qwen2-moe", 2),
        ("gpt-oss", 2),
        ("glm4-moe", 2),
        ("minimax-m2", 2),
        ("mimo-v2", 2),
        ("mimo-v2", 4),
        ("llama4", 2),
        ("deepseek-v2-lite", 2),
        ("deepseek-v3", 4),
        ("deepseek-v32", 2),
        ("glm-moe-dsa-shared", 2),
        ("longcat-flash", 2),
    ],
)
def test_greedy_tokens_equal_transformers(
    name: str, size: int, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    """With four ranks, two ranks share each KV head."""
    paths = reference(name).clear_paths(4, LENGTH)
    engine, runner = make_engine(
        checkpoint(name), size, attention_backend="auto", max_num_batched_tokens=23
    )
    outputs = run(
        engine,
        [request(str(index), path.prompt, greedy(LENGTH)) for index, path in enumerate(paths)],
    )
    close(runner)
    assert [tuple(outputs[str(i), 0].token_ids) for i in range(4)] == [p.output for p in paths]


def prompts() -> list[tuple[int, ...]]:
    """Prompts with common beginnings, and with repetitions that n-grams find."""
    shared = tuple(range(30, 50))
    return [(*shared, 100 + i, *([60 + i, 70, 80] * 4), 60 + i) for i in range(5)]


def drawn() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=12, seed=4, n=3, ignore_eos=True),
        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=12, seed=5, logprobs=3),
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(temperature=0.8, max_tokens=12, seed=7, repetition_penalty=1.3),
    ]


def all_outputs(engine: Engine) -> dict[tuple[str, int], Output]:
    found: dict[tuple[str, int], Output] = {}
    for turn in range(2):
        requests = [
            request(f"{turn}-{index}", prompt, params, seed=index)
            for index, (prompt, params) in enumerate(zip(prompts(), drawn(), strict=True))
        ]
        found |= run(engine, requests)
    return found


@pytest.mark.parametrize(
    ("name", "speculation", "expert_parallel"),
    [
        ("qwen3", "ngram", False),
        ("qwen3", "draft_model", False),
        ("qwen3", None, False),
        ("qwen3-moe", "ngram", True),
        ("qwen3-moe", None, True),
    ],
)
def test_sequences_get_the_tokens_of_one_process_after_any_events(
    name: str,
    speculation: Literal["ngram", "draft_model"] | None,
    expert_parallel: bool,
    checkpoint: CheckpointMaker,
) -> None:
    """Preemption, swaps, prefix hits, forks and log probabilities at once, with drafts, or with
    steps that are submitted ahead."""
    folder = checkpoint(name)
    draft = str(checkpoint("llama")) if speculation == "draft_model" else None
    options: dict[str, Any] = {
        "enable_expert_parallel": expert_parallel,
        "num_blocks": 26,
        "watermark": 0.0,
        "swap_space": 0.01,
        "max_num_batched_tokens": 24,
        "speculative_config": None
        if speculation is None
        else SpeculativeConfig(method=speculation, model=draft, adaptive=False),
        "async_scheduling": speculation is None,
    }
    alone = all_outputs(Engine(engine_config(folder), ModelRunner(engine_config(folder))))
    engine, runner = make_engine(folder, 2, **options)
    found = all_outputs(engine)
    close(runner)
    stats = engine.stats()
    assert stats.swaps > 0 and stats.prefix_hit_tokens > 0
    assert found.keys() == alone.keys()
    for key, output in found.items():
        assert output.token_ids == alone[key].token_ids, key
        for own, other in zip(output.logprobs, alone[key].logprobs, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_each_rank_replays_its_own_graphs(
    checkpoint: CheckpointMaker, reference: ReferenceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording for each size of batch, so that none is padded; ranks are threads of the test."""
    replays = Replays()
    monkeypatch.setattr(attention, "select", lambda *_: PaddedReference())
    monkeypatch.setattr(DecodeRecorder, "refusal", lambda _: None)
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda: replays)
    monkeypatch.setattr(
        CaptureSizes, "up_to", lambda count, length: CaptureSizes((1, 2, 3), (length,))
    )
    paths = reference("qwen3").clear_paths(3, LENGTH)
    engine, runner = make_engine(checkpoint("qwen3"), 2, max_num_seqs=3)
    runner.warm_up()
    outputs = run(
        engine,
        [request(str(index), path.prompt, greedy(LENGTH)) for index, path in enumerate(paths)],
    )
    close(runner)
    assert [tuple(outputs[str(i), 0].token_ids) for i in range(3)] == [p.output for p in paths]
    assert len(replays.used) >= 2 * (LENGTH - 1), "of both ranks"


def test_memory_for_the_graphs_of_each_rank_is_kept_free(
    checkpoint: CheckpointMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank records its two largest steps with a small cache before memory is divided.

    The first one takes 50 bytes and each further one 10 on rank 0, twice as many on the others. The
    rank with the least room decides.
    """
    replays, first = Replays(), current_thread().name
    others = ("rank-1", "rank-2", "rank-3")
    free = {first: iter((1000, 950, 940))} | {name: iter((1000, 900, 880)) for name in others}
    found: dict[str, int] = {}

    def count(config: Any, device: Any, per_block: int, length: int, profile: Profile) -> int:
        name = current_thread().name
        found[name] = profile()
        return 10_000 - found[name]

    monkeypatch.setattr(attention, "select", lambda *_: PaddedReference())
    monkeypatch.setattr(DecodeRecorder, "refusal", lambda _: None)
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda: replays)
    monkeypatch.setattr(cuda_graphs, "free_bytes", lambda _: next(free[current_thread().name]))
    monkeypatch.setattr(
        CaptureSizes, "up_to", lambda count, length: CaptureSizes((1, 2, 3), (64, length))
    )
    monkeypatch.setattr(placed_model, "count_blocks", count)
    monkeypatch.setattr(rank, "count_blocks", count)
    _, runner = make_engine(checkpoint("llama"), 4, max_num_seqs=3, max_num_batched_tokens=32)
    close(runner)
    inputs = found[first] - (50 + 5 * 10)
    assert [found[name] for name in others] == [inputs + 100 + 5 * 20] * 3 and inputs > 0
    assert runner.num_blocks == 10_000 - max(found.values())
    assert sorted(shape[0] for shape in replays.recorded) == [2] * 4 + [3] * 4


def test_a_vocabulary_need_not_be_divisible(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen2", vocab_size=251)
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, logprobs=20)
    config = engine_config(folder)
    alone = run(Engine(config, ModelRunner(config)), [request("r", prompts()[0], params)])
    engine, runner = make_engine(folder, 2, quantization="none")
    found = run(engine, [request("r", prompts()[0], params)])
    close(runner)
    assert found["r", 0].token_ids == alone["r", 0].token_ids
    for own, other in zip(found["r", 0].logprobs, alone["r", 0].logprobs, strict=True):
        assert dict(own.top) == pytest.approx(dict(other.top), abs=1e-3)


def test_embeddings_are_those_of_one_process(checkpoint: CheckpointMaker) -> None:
    folder = checkpoint("qwen3")
    options: dict[str, Any] = {"task": "embed", "pooler_config": {"pooling_type": "MEAN"}}
    config = engine_config(folder, **options)
    alone = embed(Engine(config, ModelRunner(config)), [list(prompts()[0])])
    engine, runner = make_engine(folder, 2, **options)
    found = embed(engine, [list(prompts()[0])])
    close(runner)
    assert found == pytest.approx(alone, abs=1e-5)


def embed(engine: Engine, ids: list[list[int]]) -> list[float]:
    given = [(each, ()) for each in ids]
    outputs = embed_prompts(engine, given, PoolingParams(), use_tqdm=False)
    return [float(value) for value in outputs[0].outputs.embedding]


@pytest.mark.parametrize("form", [gptq(size=16), gptq(size=32, desc_act=True), awq(32)])
def test_quantised_weights_are_cut_between_groups(form: Format, tmp_path: Path) -> None:
    """The 96 inputs of down_proj are three groups of 32: one rank has one of them."""
    packed, whole = save_quantized(tmp_path, "llama", form)
    path = Reference(whole).clear_paths(1, LENGTH)[0]
    engine, runner = make_engine(packed, 2)
    outputs = run(engine, [request("0", path.prompt, greedy(LENGTH))])
    close(runner)
    assert tuple(outputs["0", 0].token_ids) == path.output


def test_experts_in_mxfp4_are_cut_between_blocks(tmp_path: Path) -> None:
    """Each expert has three blocks of 32 inputs for two ranks."""
    packed, whole = save_mxfp4(tmp_path, intermediate_size=96)
    path = Reference(whole).clear_paths(1, LENGTH)[0]
    engine, runner = make_engine(packed, 2, attention_backend="auto")
    outputs = run(engine, [request("0", path.prompt, greedy(LENGTH))])
    close(runner)
    assert tuple(outputs["0", 0].token_ids) == path.output


@pytest.mark.proves("ranks")
@pytest.mark.proves("quantised")
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights_of_other_architectures_are_cut(name: str, tmp_path: Path) -> None:
    # Half of the inputs are whole groups of 16.
    divisible = {"v_head_dim": 24, "moe_intermediate_size": 64}
    divisible["shared_expert_intermediate_size"] = 64
    options = SHAPES[name].options
    changes: dict[str, Any] = {field: size for field, size in divisible.items() if field in options}
    packed, whole = save_quantized(tmp_path, name, awq(16), **changes)
    path = Reference(whole).clear_paths(1, LENGTH)[0]
    engine, runner = make_engine(packed, 2)
    outputs = run(engine, [request("0", path.prompt, greedy(LENGTH))])
    close(runner)
    assert tuple(outputs["0", 0].token_ids) == path.output


@pytest.mark.parametrize("block", [None, (16, 16)])
def test_weights_that_stay_in_fp8_are_cut(
    block: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cuts weights as on GPUs, except that the parts are multiplied in float32 here."""

    def widened(part: Float8Weight, bias: torch.Tensor | None, device: torch.device) -> PlainLinear:
        return PlainLinear(part.dequantize().to(device), bias)

    monkeypatch.setattr(linear_maker, "supports_float8", lambda _: True)
    monkeypatch.setattr(linear_maker, "make_float8", widened)
    packed, whole = save_fp8(tmp_path, "llama", block)
    path = Reference(whole).clear_paths(1, LENGTH)[0]
    engine, runner = make_engine(packed, 2)
    outputs = run(engine, [request("0", path.prompt, greedy(LENGTH))])
    close(runner)
    assert tuple(outputs["0", 0].token_ids) == path.output


def test_each_rank_keeps_its_kv_in_8_bits(checkpoint: CheckpointMaker) -> None:
    """Half the bytes, and the tokens of one process.

    Gemma's tokens differ little from those with unrounded KV, and for this prompt they are far
    ahead of other tokens.
    """
    folder = checkpoint("gemma2")
    (path,) = Reference(folder).clear_paths(1, LENGTH)
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "attention_backend": "auto"}
    engine, runner = make_engine(folder, 2, **options)
    outputs = run(engine, [request("0", path.prompt, greedy(LENGTH))])
    assert all(part.element_size() == 1 for cache in runner._caches for part in cache)
    close(runner)
    alone = Engine(engine_config(folder, **options), ModelRunner(engine_config(folder, **options)))
    expected = run(alone, [request("0", path.prompt, greedy(LENGTH))])
    assert outputs["0", 0].token_ids == expected["0", 0].token_ids


def test_a_cut_within_a_group_is_refused(tmp_path: Path) -> None:
    """The 192 inputs of down_proj are three groups of 64."""
    packed, _ = save_quantized(tmp_path, "llama", awq(64), intermediate_size=192)
    with pytest.raises(ConfigError, match=r"cuts the 192 inputs of .*down_proj.* 3 quantisation"):
        make_engine(packed, 2)


@pytest.mark.parametrize(
    ("name", "size", "options", "words"),
    [
        ("llama", 3, {}, r"3 does not divide num_attention_heads \(4\)"),
        ("llama", 8, {}, r"8 does not divide num_attention_heads \(4\)"),
        ("gpt_neox", 2, {}, "native models, and GPTNeoXForCausalLM"),
        ("llama", 2, {"model_implementation": "transformers"}, "native models"),
        ("llama", 2, {"deterministic": True}, "deterministic is for one process"),
        ("llama", 0, {}, "tensor_parallel_size must be at least 1, not 0"),
    ],
)
def test_indivisible_models_are_refused_before_a_rank_starts(
    name: str, size: int, options: dict[str, Any], words: str, checkpoint: CheckpointMaker
) -> None:
    def launch(rank: int, size: int, on_end: OnEnd) -> RankThread:
        raise AssertionError("a rank was started")

    with pytest.raises(ConfigError, match=words):
        config = engine_config(checkpoint(name), tensor_parallel_size=size, **options)
        ModelRunner(config, launch=launch)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 95}, r"does not divide intermediate_size \(95\)"),
        (
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
            r"neither divides num_key_value_heads \(3\)",
        ),
    ],
)
def test_sizes_that_cannot_be_divided_are_named(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, "llama", **changes)
    with pytest.raises(ConfigError, match=words):
        make_engine(folder, 2)
