"""LoRA adapters of decoders with recurrent layers give the tokens of merged weights: on the
products around recurrences, on attention, MLPs and mixtures, in one batch with other requests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from headrace_engine.models.hybrid.adapters import AdaptedLinear
from headrace_engine.models.hybrid.decoder import HybridDecoder
from headrace_engine.models.hybrid.layers import ShortConvLayer
from headrace_testing.adapter_scenes import AdapterScene
from headrace_testing.adapters import ALL_MODULES
from headrace_testing.checkpoints import HYBRID
from headrace_testing.engines import cpu_backends, make_runner

CheckpointMaker = Callable[[str], Path]
MAMBA = ("in_proj", "x_proj", "dt_proj", "out_proj")
MODULES: dict[str, tuple[str, ...]] = {
    "kimi-linear": (*ALL_MODULES, "f_a_proj", "g_b_proj", "b_proj", "kv_a_proj_with_mqa"),
    "lfm2": (*ALL_MODULES, *MAMBA, "w1", "w2", "w3"),
    "lfm2-moe": (*ALL_MODULES, *MAMBA, "w1", "w2", "w3"),
    "nemotron-h-latent": (*ALL_MODULES, *MAMBA, "fc1_latent_proj", "fc2_latent_proj"),
    "granite-hybrid": (*ALL_MODULES, *MAMBA, "input_linear", "output_linear"),
    "qwen3-next": (*ALL_MODULES, "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5-multimodal", "qwen3_5-moe", "qwen3_5-moe-multimodal"),
        (*ALL_MODULES, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
    ),
}


@pytest.mark.proves("adapters")
@pytest.mark.parametrize("name", HYBRID)
def test_a_batch_gives_the_tokens_of_merged_weights(
    name: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """The prompts of both are the same, so that cached states of one must not serve the other."""
    modules = MODULES.get(name, (*ALL_MODULES, *MAMBA))
    scene = AdapterScene(tmp_path, checkpoint(name), {"a": {"modules": modules, "seed": 1}})
    scene.run(scene.llm(attention_backend=cpu_backends()[-1]), [None, "a"], count=2)


@pytest.mark.parametrize(
    ("name", "experts", "seed"),
    [
        ("qwen3-next", "apart", 1),
        ("qwen3_5-moe", "joined", 2),
        ("granite-hybrid", "apart", 1),
        ("granite-hybrid", "joined", 2),
        ("nemotron-h", "apart", 1),
        ("nemotron-h-latent", "joined", 2),
    ],
)
def test_adapters_change_experts(
    name: str, experts: str, seed: int, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    kind = {"modules": ("out_proj", "gate"), "experts": experts, "seed": seed}
    kinds = {"a": {**kind, "peft_version": "0.19.0"}}
    scene = AdapterScene(tmp_path, checkpoint(name), kinds)
    llm = scene.llm(lora_modules={"a": str(scene.folders["a"])})
    scene.run(llm, [None, "a"], count=2)


def test_granites_older_names_of_experts_are_read(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """In which the experts' two parameters are those of two modules."""
    kinds = {"a": {"modules": ("out_proj",), "experts": "joined"}}
    scene = AdapterScene(tmp_path, checkpoint("granite-hybrid"), kinds)
    file = scene.folders["a"] / "adapter_model.safetensors"
    older = {".experts.base_layer.": ".input_linear.", ".experts.": ".output_linear."}
    tensors = load_file(file)
    for name, replaced in older.items():
        tensors = {key.replace(name, replaced): tensor for key, tensor in tensors.items()}
    save_file(tensors, file)
    llm = scene.llm(lora_modules={"a": str(scene.folders["a"])})
    scene.run(llm, [None, "a"], count=2)


def test_layers_take_adapters_only_if_the_engine_does(checkpoint: CheckpointMaker) -> None:
    folder = checkpoint("lfm2")
    for enabled in (False, True):
        model = make_runner(folder, enable_lora=enabled).model
        assert isinstance(model, HybridDecoder)
        layer = model._weights.parts[0].layer
        assert isinstance(layer, ShortConvLayer)
        assert isinstance(layer.output, AdaptedLinear) == enabled
