"""Decoders with recurrent layers give transformers' tokens in beams, with steps ahead and from
stacked experts; what they do not support is refused by name.

Left out: devices other than the CPU, and how requests are scheduled (test_schedules.py).
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import transformers

from headrace_common.sampling.params import SamplingParams
from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.checkpoints.tensor_files import scan
from headrace_engine.core.errors import ConfigError
from headrace_engine.engine.engine import Engine
from headrace_engine.model_loader.describe_model import describe
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models.hybrid.decoder import HybridDecoder
from headrace_engine.models.hybrid.family import Parts
from headrace_engine.models.hybrid.hybrid import read_family
from headrace_engine.models.hybrid.kimi_linear import KimiLinear
from headrace_engine.models.hybrid.tensors import ExpectedTensors
from headrace_engine.operators.base import TorchOps
from headrace_testing.checkpoints import HYBRID, GreedyPath, Reference, save_checkpoint
from headrace_testing.engines import engine_config, greedy, make_runner, request, run
from headrace_testing.greedy import serve

LENGTH = 8
WITHOUT_ATTENTION = ("mamba", "falcon-mamba", "mamba2")

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]


@pytest.fixture(scope="module", params=HYBRID)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def paths(name: str, reference: ReferenceMaker) -> list[GreedyPath]:
    return reference(name).clear_paths(8, LENGTH)


@pytest.fixture(scope="module")
def runner(name: str, checkpoint: CheckpointMaker) -> ModelRunner:
    return make_runner(checkpoint(name), attention_backend="cpu", threads=1)


def test_tenants_share_no_state(runner: ModelRunner, paths: list[GreedyPath]) -> None:
    engine = Engine(engine_config(Path("unused")), runner)
    path = max(paths, key=lambda each: len(each.prompt))
    for salt in (b"a", b"b", b"a"):
        one = request("r", path.prompt, greedy(LENGTH))
        object.__setattr__(one, "cache_salt", salt)
        found = run(engine, [one])["r", 0]
        assert tuple(found.token_ids) == path.output
    assert engine.stats().prefix_hit_tokens == (len(path.prompt) - 1) // 4 * 4


def test_steps_ahead_give_the_same_tokens(
    name: str, checkpoint: CheckpointMaker, paths: list[GreedyPath]
) -> None:
    serve(make_runner(checkpoint(name), threads=1, async_scheduling=True), paths)


def test_beams_equal_transformers(
    name: str, runner: ModelRunner, reference: ReferenceMaker, paths: list[GreedyPath]
) -> None:
    prompt = paths[2].prompt
    found = reference(name).model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=8,
        num_beams=3,
        do_sample=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, use_beam_search=True, best_of=3)
    engine = Engine(engine_config(Path("unused")), runner)
    output = run(engine, [request("beams", prompt, params)])["beams", 0]
    assert output.token_ids == found[0, len(prompt) :].tolist()


def test_bfloat16_logits_are_as_close_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    """For most prompts: where two experts are nearly as good, rounding chooses between them."""
    folder = save_checkpoint(tmp_path, name, dtype=torch.bfloat16)
    exact, rounded = Reference(folder), Reference(folder, torch.bfloat16)
    runner = make_runner(folder, dtype="auto", attention_backend="cpu", threads=1)
    assert runner.dtype is torch.bfloat16
    engine = Engine(engine_config(folder), runner)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    ours, theirs = [], []
    for first, length in ((20, 40), (23, 47), (26, 56)):
        prompts = [tuple(range(first + at, first + at + length)) for at in range(3)]
        wanted, others = (
            each.batch_logits(prompts)[:, -1].log_softmax(-1) for each in (exact, rounded)
        )
        theirs += (others - wanted).abs().amax(-1).tolist()
        for prompt, row in zip(prompts, wanted, strict=True):
            found = run(engine, [request("r", prompt, params)])["r", 0].logprobs[0].top
            ours.append(max(abs(value - float(row[token])) for token, value in found))
    assert median(ours) < 2 * median(theirs) + 0.02


def test_models_check_describes_the_checkpoint(name: str, checkpoint: CheckpointMaker) -> None:
    found = describe(load_checkpoint(str(checkpoint(name))))
    assert ("ForConditionalGeneration" in found.architecture) == ("multimodal" in name)
    assert found.implementation == "native"
    assert bool(found.kv_bytes_per_token) == (name not in WITHOUT_ATTENTION)
    assert found.state_bytes_per_sequence > 0


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("BambaConfig", {"attn_layer_indices": [9, 18, 27]}),
        ("FalconH1Config", {}),
        ("JambaConfig", {}),
        ("KimiLinearConfig", {}),
        (
            "Lfm2MoeConfig",
            {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
        ),
        ("FalconMambaConfig", {}),
        ("MambaConfig", {}),
        ("Mamba2Config", {}),
        ("NemotronHConfig", {"moe_latent_size": 1024}),
        ("Qwen3_5MoeTextConfig", {}),
    ],
)
def test_every_parameter_is_read_where_sizes_are_the_defaults(
    config: str, options: dict[str, Any], tmp_path: Path
) -> None:
    made = getattr(transformers, config)(**options)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(made)
    made.architectures = [type(model).__name__]
    made.save_pretrained(tmp_path)
    family, expected = read_family(load_checkpoint(str(tmp_path))), ExpectedTensors(torch.bfloat16)
    family.build(expected, Parts(ReferenceBackend(), TorchOps(), torch.bfloat16))
    wanted = sum(parameter.numel() for parameter in model.state_dict().values())
    tied = family.vocab * family.hidden * family.tied
    assert sum(map(prod, expected.shapes.values())) == wanted - tied


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("bamba", "attn_layer_indices", []),
        ("bamba", "partial_rotary_factor", 1.0),
        ("falcon-h1", "mamba_d_head", 7),
        ("falcon-h1", "mlp_multipliers", [1.0]),
        ("falcon-h1", "time_step_limit", [0.0, 1.0]),
        ("granite-hybrid", "time_step_limit", [0.0, 1.0]),
        ("jamba", "attn_layer_offset", 8),
        ("jamba", "mamba_inner_layernorms", False),
        ("kimi-linear", "linear_attn_config", {"num_heads": 0}),
        ("kimi-linear", "mla_use_nope", False),
        ("kimi-linear", "mlp_layer_types", ["dense"]),
        ("kimi-linear", "num_expert_group", 5),
        ("kimi-linear", "num_experts_per_token", 7),
        ("lfm2-moe", "num_experts_per_tok", 7),
        ("mamba", "hidden_act", "gelu"),
        ("mamba", "time_step_rank", 0),
        ("nemotron-h", "attention_bias", True),
        ("nemotron-h", "layer_types", ["linear_attention", "mlp"]),
        ("nemotron-h", "mlp_hidden_act", "silu"),
        ("nemotron-h", "num_experts_per_tok", 7),
        ("qwen3_5-moe", "num_experts_per_tok", 7),
    ],
)
def test_fields_that_are_not_supported_are_refused_by_name(
    family: str, field: str, value: object, checkpoint: CheckpointMaker
) -> None:
    found = load_checkpoint(str(checkpoint(family)))
    changed = replace(found, config={**found.config, field: value})
    with pytest.raises(ConfigError, match=field):
        read_family(changed)


@pytest.mark.parametrize(
    "mixture", ["jamba", "lfm2-moe", "nemotron-h", "qwen3_5-moe", "qwen3_5-moe-multimodal"]
)
def test_stacked_experts_give_the_same_tokens(
    mixture: str, reference: ReferenceMaker, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, mixture, published=False)
    stored = scan(tmp_path)
    assert any(name.endswith(".experts.down_proj") for name in stored)
    paths = reference(mixture).clear_paths(8, LENGTH)
    serve(make_runner(tmp_path, attention_backend="cpu", threads=1), paths)


@pytest.mark.parametrize(
    "options",
    [
        {"swap_space": 0.1},
        {"deterministic": True},
    ],
)
def test_what_is_not_supported_is_refused(
    options: dict[str, Any], name: str, checkpoint: CheckpointMaker
) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_runner(checkpoint(name), attention_backend="cpu", threads=1, **options)


@pytest.mark.refuses("native call")
def test_a_step_is_many_native_calls(name: str, runner: ModelRunner) -> None:
    assert isinstance(runner.model, HybridDecoder)


def test_the_published_fields_of_kimi_linear_are_read(checkpoint: CheckpointMaker) -> None:
    found = load_checkpoint(str(checkpoint("kimi-linear")))
    told = {name: value for name, value in found.config.items() if "linear_" not in name}
    del told["layer_types"], told["mlp_layer_types"]
    told["first_k_dense_replace"] = 2
    told["linear_attn_config"] = {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 3,
    }
    family, usual = read_family(replace(found, config=told)), read_family(found)
    assert isinstance(family, KimiLinear) and isinstance(usual, KimiLinear)
    assert family.types == usual.types and family.delta == usual.delta and family.window == 3
    assert family.experts == replace(usual.experts, sparse=(False, False, True, True))
