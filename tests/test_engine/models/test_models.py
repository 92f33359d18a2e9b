"""Greedy tokens equal transformers' for every architecture, backend, batch and chunk size, and with
preemptions, prefix hits and forks; logits in bfloat16 are as close to the exact ones as
transformers'.

Left out: devices other than the CPU, and weights of real checkpoints.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import pytest
import torch

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.errors import ConfigError, ContextTooLong
from headrace_engine.engine.engine import Engine
from headrace_engine.models.decoder.decoder import Decoder
from headrace_engine.models.decoder.fused import FusedDecoder
from headrace_engine.models.rotary import rotary
from headrace_engine.models.transformers.transformers_model import TransformersModel
from headrace_testing.checkpoints import (
    HYBRID,
    SHAPES,
    UNUSUAL,
    VOCAB,
    GreedyPath,
    Reference,
    save_checkpoint,
)
from headrace_testing.draft_heads import change_config
from headrace_testing.engines import (
    Output,
    cpu_backends,
    engine_config,
    greedy,
    make_runner,
    request,
    run,
)

LENGTH = 12
# (requests at once, tokens of a step); the reference is slow, and only its ragged batches matter.
SIZES = {
    "reference": ((2, 1), (32, 64), (8, 512)),
    "cpu": ((1, 512), (3, 1), (8, 7), (32, 64), (16, 512)),
}
NATIVE = [
    "llama",
    "llama3-rope",
    "llama4",
    "llama4-two",
    "llama4-multimodal",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3-multimodal",
    "phi3",
    "phi3-partial",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "ministral3",
    "mistral3-multimodal",
    "glm4v",
    "glm46v",
    "glm4v-moe",
    "llava-onevision",
    "smolvlm",
    "idefics3",
    "glm",
    "glm4",
    "exaone4",
    "ernie4_5",
    "seed_oss",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "gpt-oss",
    "glm4-moe",
    "solar-open",
    "dots1",
    "minimax-m2",
    "mimo-v2",
    "olmoe",
    "ernie4_5-moe",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "kimi-k25-multimodal",
    "deepseek-v32",
    "glm-moe-dsa",
    "glm-moe-dsa-shared",
    "longcat-flash",
    "glm4-moe-lite",
    "hunyuan",
    "hunyuan-moe",
]
FOREIGN = ["gpt_neox", "gpt2", "gemma4-multimodal", "gemma4-small"]
# Without a native call for a whole step.
LAYERED = [
    "mimo-v2",
    "deepseek-v32",
    "glm-moe-dsa",
    "glm-moe-dsa-shared",
    "longcat-flash",
    "hunyuan",
    "hunyuan-moe",
]
MANY = ("llama", "mistral", "gemma2", "gpt_neox")
# Small variants of other architectures, and those whose batches test_schedules.py varies.
FEW = (
    "smollm3", "olmo2", "olmo3", "granite", "ministral3", "mistral3-multimodal", "glm",
    "glm4", "exaone4", "ernie4_5", "seed_oss", "glm-moe-dsa",
    "llama4-multimodal", "kimi-k25-multimodal", "qwen2-vl", "qwen2.5-vl",
    "qwen3-vl", "glm4v", "glm46v", "glm4v-moe", "llava-onevision", "smolvlm", "idefics3",
    "gemma4-multimodal", "gemma4-small", *UNUSUAL,
)  # fmt: skip


class Rounded(NamedTuple):
    folder: Path
    prompt: tuple[int, ...]
    exact: torch.Tensor
    rounded: torch.Tensor


native_kernels = pytest.mark.skipif("cpu" not in cpu_backends(), reason="no native kernels")
CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]


@pytest.fixture(scope="module", params=cpu_backends())
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rounded]:
    """A checkpoint in bfloat16, and transformers' log probabilities after a prompt, by name."""

    @cache
    def make(name: str) -> Rounded:
        folder = save_checkpoint(tmp_path_factory.mktemp(name), name, dtype=torch.bfloat16)
        prompt = tuple(range(20, 60))
        exact, rounded = (
            Reference(folder, dtype).logits(prompt)[-1].log_softmax(-1)
            for dtype in (torch.float32, torch.bfloat16)
        )
        return Rounded(folder, prompt, exact, rounded)

    return make


def serve(folder: Path, paths: list[GreedyPath], **options: Any) -> Engine:
    """Runs all paths' prompts at once and checks every token."""
    engine = Engine(engine_config(folder, **options), make_runner(folder, **options))
    check(engine, paths)
    return engine


def check(engine: Engine, paths: list[GreedyPath]) -> None:
    outputs = run(
        engine,
        [request(str(index), path.prompt, greedy(LENGTH)) for index, path in enumerate(paths)],
    )
    for index, path in enumerate(paths):
        assert tuple(outputs[str(index), 0].token_ids) == path.output, f"prompt {index}"


@pytest.mark.proves("tokens")
@pytest.mark.parametrize("name", NATIVE + FOREIGN)
def test_greedy_tokens_equal_transformers(
    name: str, backend: str, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    count = 32 if name in MANY else 4 if name in FEW else 10
    paths = reference(name).clear_paths(count, LENGTH)
    assert len({path.output for path in paths}) > count / 2, "the model must not ignore its prompt"
    sizes = [(4, 7)] if name in FEW else SIZES[backend]
    folder, most = checkpoint(name), max(chunk for _, chunk in sizes)
    runner = make_runner(folder, attention_backend=backend, max_num_batched_tokens=most)
    for batch, chunk in sizes:
        options = engine_config(folder, attention_backend=backend, max_num_batched_tokens=chunk)
        check(Engine(options, runner), paths[:batch])


@pytest.mark.proves("tokens", architectures=["MiMoForCausalLM"])
def test_mimo_has_the_decoder_of_qwen2(
    backend: str, checkpoint: CheckpointMaker, reference: ReferenceMaker, tmp_path: Path
) -> None:
    folder = copytree(checkpoint("qwen2"), tmp_path / "mimo")
    change_config(folder, architectures=["MiMoForCausalLM"], model_type="mimo")
    serve(folder, reference("qwen2").clear_paths(4, LENGTH), attention_backend=backend)


@native_kernels
@pytest.mark.proves("native call")
@pytest.mark.parametrize("name", [name for name in NATIVE if name not in LAYERED])
def test_a_step_is_one_native_call(name: str, checkpoint: CheckpointMaker) -> None:
    runner = make_runner(checkpoint(name), attention_backend="cpu")
    assert isinstance(runner.model, FusedDecoder)


@native_kernels
@pytest.mark.refuses("native call")
@pytest.mark.parametrize("name", LAYERED)
def test_other_decoders_are_computed_layer_by_layer(name: str, checkpoint: CheckpointMaker) -> None:
    runner = make_runner(checkpoint(name), attention_backend="cpu")
    assert isinstance(runner.model, Decoder)


@pytest.mark.parametrize("name", NATIVE)
def test_float32_logits_equal_transformers(
    name: str, backend: str, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    """Chunk by chunk. Tied embeddings hide small errors from greedy tokens."""
    prompt = tuple(range(20, 60))
    exact = reference(name).logits(prompt)[-1].log_softmax(-1)
    options: dict[str, Any] = {"attention_backend": backend, "max_num_batched_tokens": 17}
    folder = checkpoint(name)
    engine = Engine(engine_config(folder, **options), make_runner(folder, **options))
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    found = run(engine, [request("r", prompt, params)])["r", 0]
    assert max(abs(value - float(exact[token])) for token, value in found.logprobs[0].top) < 1e-3


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3", "mixtral"])
def test_preempted_sequences_continue_with_the_same_tokens(
    name: str, backend: str, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    engine = serve(
        checkpoint(name),
        reference(name).clear_paths(8, LENGTH),
        attention_backend=backend,
        num_blocks=24,
        max_num_batched_tokens=32,
        watermark=0.0,
    )
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("name", ["deepseek-v32", "glm-moe-dsa-shared", "mimo-v2"])
def test_swapped_sequences_continue_with_the_same_tokens(
    name: str, backend: str, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    engine = serve(
        checkpoint(name),
        reference(name).clear_paths(8, LENGTH),
        attention_backend=backend,
        num_blocks=24,
        max_num_batched_tokens=32,
        watermark=0.0,
        swap_space=0.01,
        enable_prefix_caching=False,
    )
    stats = engine.stats()
    assert stats.swap_in_bytes == stats.swap_out_bytes > 0


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gemma2", "qwen3-moe"])
def test_prefix_hits_change_no_token(
    name: str, backend: str, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    prefix = tuple(range(10, 40))
    paths = reference(name).clear_paths(6, LENGTH, lambda index: 1 + index, lambda _: prefix)
    folder = checkpoint(name)
    options: dict[str, Any] = {"attention_backend": backend}
    engine = Engine(engine_config(folder, **options), make_runner(folder, **options))
    check(engine, paths[:1])
    check(engine, paths)
    assert engine.stats().prefix_hit_tokens >= 5 * 28


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "glm4-moe-lite"])
def test_forked_choices_share_blocks_and_give_the_same_tokens(
    name: str, backend: str, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    path = reference(name).clear_paths(1, LENGTH, lambda _: 21)[0]
    folder = checkpoint(name)
    runner = make_runner(folder, attention_backend=backend)
    engine = Engine(engine_config(folder), runner)
    outputs = run(engine, [request("fork", path.prompt, greedy(LENGTH, n=4))])
    assert [tuple(outputs["fork", choice].token_ids) for choice in range(4)] == [path.output] * 4


def test_sampled_tokens_depend_on_seed_and_choice_only(
    backend: str, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    paths = reference("llama").clear_paths(8, LENGTH)
    folder = checkpoint("llama")
    runner = make_runner(folder, attention_backend=backend, num_blocks=28)
    params = SamplingParams(temperature=0.7, top_p=0.9, n=2, max_tokens=LENGTH, ignore_eos=True)
    requests = [request(str(i), path.prompt, params, seed=i) for i, path in enumerate(paths)]
    alone: dict[tuple[str, int], Output] = {}
    for one in requests:
        alone |= run(Engine(engine_config(folder, max_num_batched_tokens=512), runner), [one])
    crowded = Engine(engine_config(folder, max_num_batched_tokens=24, watermark=0.0), runner)
    together = run(crowded, requests)
    assert crowded.stats().preemptions > 0
    assert {key: one.token_ids for key, one in together.items()} == {
        key: one.token_ids for key, one in alone.items()
    }
    assert alone["0", 0].token_ids != alone["0", 1].token_ids


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama4",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3",
        "phi3",
        "olmo2",
        "granite",
        "mixtral",
        "gpt-oss",
        "mimo-v2",
        "deepseek-v3",
    ],
)
def test_bfloat16_logits_are_as_close_as_those_of_transformers(
    name: str, backend: str, in_bfloat16: Callable[[str], Rounded]
) -> None:
    folder, prompt, exact, rounded = in_bfloat16(name)
    runner = make_runner(folder, dtype="auto", attention_backend=backend)
    assert runner.dtype is torch.bfloat16
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    found = run(Engine(engine_config(folder), runner), [request("r", prompt, params)])["r", 0]
    top = dict(found.logprobs[0].top)
    ours = max(abs(value - float(exact[token])) for token, value in top.items())
    theirs = float((rounded - exact).abs().max())
    assert ours < 2 * theirs + 0.02


def longrope(tmp_path: Path) -> Path:
    """Trained for 16 positions, stretched to 128."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 0.5 * i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    return save_checkpoint(
        tmp_path,
        "phi3",
        rope_parameters=rope,
        max_position_embeddings=128,
        original_max_position_embeddings=16,
    )


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_short_rotary_factors_where_the_context_is_short(
    implementation: str, tmp_path: Path
) -> None:
    folder = longrope(tmp_path)
    paths = Reference(folder).clear_paths(4, 6, lambda _: 5)
    runner = make_runner(folder, max_model_len=16, model_implementation=implementation)
    engine = Engine(engine_config(folder), runner)
    outputs = run(engine, [request(str(i), p.prompt, greedy(6)) for i, p in enumerate(paths)])
    assert [tuple(one.token_ids) for one in outputs.values()] == [path.output for path in paths]


@pytest.mark.parametrize("name", ["llama4", "qwen3-next"])
def test_rotations_made_by_need_change_no_token(
    name: str,
    backend: str,
    checkpoint: CheckpointMaker,
    reference: ReferenceMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rotary, "WHOLE", 8)
    monkeypatch.setattr(rotary, "_ROWS", 8)
    serve(checkpoint(name), reference(name).clear_paths(4, LENGTH), attention_backend=backend)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_long_rotary_factors_do_not_depend_on_the_batch(
    implementation: str, tmp_path: Path
) -> None:
    folder = longrope(tmp_path)
    paths = Reference(folder).clear_paths(3, LENGTH, lambda _: 30)
    runner = make_runner(folder, model_implementation=implementation)
    check(Engine(engine_config(folder), runner), paths)
    short = request("short", (5, 6, 7), greedy(LENGTH))
    alone = run(Engine(engine_config(folder), runner), [short])
    long = request("long", paths[0].prompt, greedy(LENGTH))
    together = run(Engine(engine_config(folder), runner), [short, long])
    assert together["short", 0] == alone["short", 0]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
def test_native_models_can_also_be_served_by_transformers(
    name: str, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    serve(
        checkpoint(name),
        reference(name).clear_paths(4, LENGTH),
        model_implementation="transformers",
    )


def test_native_is_refused_without_a_native_implementation(checkpoint: CheckpointMaker) -> None:
    with pytest.raises(ConfigError, match="native has no GPTNeoXForCausalLM"):
        make_runner(checkpoint("gpt_neox"), model_implementation="native")


def test_a_field_that_native_does_not_support_is_left_to_transformers(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama", hidden_act="gelu")
    with pytest.raises(ConfigError, match=r"config\.json: hidden_act must be one of silu"):
        make_runner(folder, model_implementation="native")
    runner = make_runner(folder)
    assert isinstance(runner.model, TransformersModel)
    path = Reference(folder).clear_paths(1, LENGTH)[0]
    check(Engine(engine_config(folder), runner), [path])


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ("BloomConfig", {"hidden_size": 32, "n_layer": 1, "n_head": 2}, "attention interface"),
        ("T5Config", {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16}, "T5"),
        (
            "GptOssConfig",
            {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "intermediate_size": 16,
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
            },
            "s_aux",
        ),
        ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 1}, "attention"),
        (
            "MiMoV2FlashConfig",
            {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 24,
                "v_head_dim": 16,
                "layer_types": ["full_attention", "sliding_attention"],
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "pad_token_id": 0,
            },
            "needs s_aux",
        ),
        (
            "DeepseekV32Config",
            {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": 16,
                "pad_token_id": 0,
            },
            "indexed_attention",
        ),
    ],
)
def test_models_that_cannot_be_served_exactly_are_refused(
    config: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    import transformers

    made = getattr(transformers, config)(vocab_size=VOCAB, **options)
    auto: Any = (
        transformers.AutoModelForSeq2SeqLM
        if made.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    auto.from_config(made).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        make_runner(tmp_path, max_model_len=128, model_implementation="transformers")


@pytest.mark.parametrize(
    ("architecture", "closest"),
    [
        ("BloomForCausalLM", "GPTNeoXForCausalLM"),
        ("DeepseekV4ForCausalLM", "DeepseekV32ForCausalLM"),
        ("FalconForCausalLM", "LlamaForCausalLM"),
        ("GPTJForCausalLM", "GPTNeoXForCausalLM"),
        ("StableLmForCausalLM", "PhiForCausalLM"),
    ],
)
def test_a_refusal_names_the_closest_model_that_is_served(
    architecture: str, closest: str, tmp_path: Path
) -> None:
    import transformers

    made = getattr(transformers, architecture).config_class(
        architectures=[architecture], dtype="float32"
    )
    made.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"{architecture} cannot be served.*{closest}"):
        make_runner(tmp_path, max_model_len=128)


def test_every_shape_is_tested() -> None:
    # The last one is tested with videos: as text transformers reads their token as none of its own.
    assert {*NATIVE, *FOREIGN, *HYBRID, "gemma4-videos"} == set(SHAPES)


def test_a_context_that_is_too_long_is_refused_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No implementation can serve it, so transformers is not tried."""
    folder = save_checkpoint(tmp_path, "llama")

    with pytest.raises(ContextTooLong, match="max_model_len 1000000 is above the longest context"):
        make_runner(folder, max_model_len=1_000_000)

    assert "transformers is used" not in caplog.text
