"""Fields missing in config.json get the defaults of transformers' config class, in every family;
unsupported values are refused by name.
"""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import transformers

from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.checkpoints.config import ARCHITECTURES, ModelConfig, RopeConfig
from headrace_engine.checkpoints.rope import QueryScaling
from headrace_engine.core.errors import ConfigError
from headrace_engine.models.decoder.decoder_tensors import expected_tensors

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
}
# Families that transformers does not have, and the one whose config class theirs extends.
STAND_INS = {"MiMoForCausalLM": "Qwen2ForCausalLM"}
# Families for which some fields have no default.
NEEDED: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "LongcatFlashForCausalLM": {"num_layers": 4, "ffn_hidden_size": 96},
    "Exaone4ForCausalLM": {"layer_types": ["sliding_attention", "full_attention"] * 4},
    "Ministral3ForCausalLM": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.1,
        }
    },
}


def read(folder: Path, name: str, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**fields, "architectures": [name]}))
    return ModelConfig.from_hf(load_checkpoint(str(folder)))


def without_parameters(config: ModelConfig) -> ModelConfig:
    """The same rotation has different parameters if it is absent and if it is written out."""

    def bare(rope: RopeConfig) -> RopeConfig:
        return replace(rope, parameters={})

    local = None if config.local_rope is None else bare(config.local_rope)
    return replace(config, rope=bare(config.rope), local_rope=local)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_absent_fields_are_as_in_transformers(name: str, tmp_path: Path) -> None:
    kind = getattr(transformers, STAND_INS.get(name, name)).config_class
    given = {**SIZES, **NEEDED.get(name, {}), "model_type": kind.model_type}
    whole = json.loads(kind(**given).to_json_string(use_diff=False))
    ours, theirs = (read(tmp_path, name, fields) for fields in (given, whole))
    assert without_parameters(ours) == without_parameters(theirs)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4vMoe"])
def test_absent_fields_of_multimodal_models_decoders_are_as_in_transformers(
    name: str, tmp_path: Path
) -> None:
    given = {**SIZES, "hidden_size": 1024}
    whole = json.loads(
        getattr(transformers, f"{name}TextConfig")(**given).to_json_string(use_diff=False)
    )
    ours, theirs = (
        read(tmp_path, f"{name}ForConditionalGeneration", {"text_config": fields})
        for fields in (given, whole)
    )
    assert without_parameters(ours) == without_parameters(theirs)


def test_old_checkpoints_of_qwen_vl_have_their_decoders_fields_beside_the_others(
    tmp_path: Path,
) -> None:
    given = {**SIZES, "hidden_size": 1024, "rope_theta": 5e6}
    old = {**given, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    new = {
        **given,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [16, 24, 24],
        },
    }
    name = "Qwen2_5_VLForConditionalGeneration"
    ours = read(tmp_path, name, {**old, "model_type": "qwen2_5_vl"})
    theirs = read(tmp_path, name, {"text_config": new})
    assert without_parameters(ours) == without_parameters(theirs)
    assert ours.rope.axes == (0,) * 16 + (1,) * 24 + (2,) * 24


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers must be a list of 8"),
        ("Exaone4ForCausalLM", {"layer_types": None}, "layer_types must be a list of 8 names"),
        ("GraniteForCausalLM", {"residual_multiplier": 0}, "residual_multiplier must be a number"),
        ("Ministral3ForCausalLM", {"rope_parameters": {}}, "llama_4_scaling_beta must be"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 2}, "partial_rotary_factor must be"),
        ("Llama4ForCausalLM", {"moe_layers": 2}, "moe_layers must be a list of layers"),
        ("Llama4ForCausalLM", {"attn_temperature_tuning": "x"}, "attn_temperature_tuning must be"),
        (
            "Llama4ForCausalLM",
            {"layer_types": ["sliding_attention"] * 8},
            "layer_types must be made of full_attention and chunked_attention",
        ),
        (
            "Llama4ForCausalLM",
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "rope_scaling must be of another type than yarn and longrope",
        ),
        ("Olmo2ForCausalLM", {"hidden_act": "gelu"}, "hidden_act must be one of silu"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, "n_group must be a divisor of the number of .* 128"),
        ("Glm4MoeForCausalLM", {"n_group": 32, "topk_group": 1}, "topk_group must be at most"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv must be one of None"),
        ("MiMoV2FlashForCausalLM", {"hybrid_layer_pattern": [1]}, "hybrid_layer_pattern must be a"),
        ("MiMoV2FlashForCausalLM", {"v_head_dim": 193}, "v_head_dim must be at most head_dim"),
        (
            "MiMoV2FlashForCausalLM",
            {"add_full_attention_sink_bias": True},
            "add_full_attention_sink_bias must be one of False",
        ),
        (
            "MiMoV2FlashForCausalLM",
            {"swa_num_key_value_heads": 3},
            "swa_num_key_value_heads must be a divisor",
        ),
        ("DeepseekV32ForCausalLM", {"index_topk_freq": 4}, "indexer_types must be full for all"),
        ("GlmMoeDsaForCausalLM", {"index_topk_pattern": "FS"}, "indexer_types must be a list of 8"),
        ("GlmMoeDsaForCausalLM", {"index_topk_pattern": "SFFFFFFF"}, "begin with full"),
        ("LongcatFlashForCausalLM", {"num_layers": None}, "num_layers must be a whole number"),
        ("LongcatFlashForCausalLM", {"zero_expert_type": "copy"}, "zero_expert_type must be one"),
        ("LongcatFlashForCausalLM", {"qk_head_dim": 7}, "qk_head_dim must be one of 192"),
        ("DeepseekV32ForCausalLM", {"q_lora_rank": None}, "q_lora_rank must be a whole number"),
        (
            "DeepseekV32ForCausalLM",
            {"index_head_dim": 32},
            "index_head_dim must be at least qk_rope_head_dim",
        ),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias must be one of False"),
        (
            "Mistral3ForConditionalGeneration",
            {"text_config": {"model_type": "llama"}},
            r"text_config\.model_type must be one of mistral, ministral3",
        ),
        (
            "Qwen2_5_VLForConditionalGeneration",
            {"rope_parameters": {"mrope_section": [1, 2, 2]}},
            r"rope_parameters\.mrope_section must be three whole numbers that add up to 4",
        ),
    ],
)
def test_unsupported_config_fields_are_named(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        read(tmp_path, name, {**SIZES, **NEEDED.get(name, {}), **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"index_topk_freq": 3},
        {"index_topk_freq": 3, "index_skip_topk_offset": 4},
        {"index_topk_pattern": "FFSFSSFS"},
        {"indexer_types": ["full", "full", "shared", "full", *["shared"] * 4]},
    ],
)
def test_layers_without_an_indexer_are_those_of_transformers(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    config = read(tmp_path, "GlmMoeDsaForCausalLM", {**SIZES, **fields})
    made: Any = transformers.GlmMoeDsaConfig(**SIZES, **fields)
    found = [config.index_of(layer) is None for layer in range(8)]
    assert found == [kind == "shared" for kind in made.indexer_types] and any(found)


def test_the_published_fields_of_mimo_v2_are_read(tmp_path: Path) -> None:
    """They are not those of transformers' config class."""
    given = {
        **SIZES,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1, 0, 1],
        "layernorm_epsilon": 1e-5,
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
        "n_shared_experts": None,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5e6,
        "routed_scaling_factor": None,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "swa_num_key_value_heads": 4,
        "swa_rope_theta": 10000,
    }
    kinds = ["sliding_attention" if each else "full_attention" for each in [0, 1, 1, 0, 1, 1, 0, 1]]
    config = read(tmp_path, "MiMoV2FlashForCausalLM", given)
    usual = read(tmp_path, "MiMoV2FlashForCausalLM", {**SIZES, "layer_types": kinds})
    assert without_parameters(config) == without_parameters(usual)
    assert [config.kv_heads(layer) for layer in range(4)] == [2, 4, 4, 2]
    assert [config.has_sinks(layer) for layer in range(4)] == [False, True, True, False]


def test_mimo_v2_flash_has_its_published_size(tmp_path: Path) -> None:
    given = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48}
    config = read(tmp_path, "MiMoV2FlashForCausalLM", {**given, "vocab_size": 152576})
    counted = sum(prod(shape) for shape in expected_tensors(config).values())
    assert abs(counted / 309e9 - 1) < 0.01
    assert sum(map(config.cached_elements, range(48))) == (9 * 4 + 39 * 8) * 2 * 192


def test_the_fields_of_published_llama_4_checkpoints_are_read(tmp_path: Path) -> None:
    """An empty list of rotated layers means the usual ones, and a number switches the scaling."""
    given = {**SIZES, "no_rope_layers": [], "attn_temperature_tuning": 4, "use_qk_norm": True}
    config = read(tmp_path, "Llama4ForCausalLM", given)
    assert config == read(tmp_path, "Llama4ForCausalLM", SIZES)
    assert config.unrotated == {3, 7} and config.windows == (8192, 8192, 8192, None) * 2
    assert config.query_scaling == QueryScaling(0.1, 8192, offset=1, unrotated=True)
