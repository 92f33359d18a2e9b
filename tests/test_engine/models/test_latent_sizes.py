"""The cache of latent models at their published sizes, as `headrace models check` reports it."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.checkpoints.config import ModelConfig
from headrace_engine.model_loader.describe_model import describe
from headrace_engine.models.decoder.decoder_tensors import expected_tensors

YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**YARN, "factor": 32},
    "rope_theta": 50000,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
# With an indexer, whose key of 128 elements is cached too.
DEEPSEEK_V32: dict[str, Any] = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
LONGCAT_FLASH: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_longcat_flash.LongcatFlashConfig"},
    "model_type": "longcat_flash",
    "attention_bias": False,
    "attention_method": "MLA",
    "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12288,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "moe_topk": 12,
    "n_routed_experts": 512,
    "num_attention_heads": 64,
    "num_layers": 28,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "routed_scaling_factor": 6.0,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 131072,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
}


@pytest.mark.parametrize(
    ("fields", "cached", "parameters"),
    [
        (DEEPSEEK_V3, 61 * (512 + 64) * 2, 671e9),
        (KIMI_K2, 61 * (512 + 64) * 2, 1027e9),
        (DEEPSEEK_V32, 61 * (512 + 64 + 128) * 2, 672e9),
        (LONGCAT_FLASH, 2 * 28 * (512 + 64) * 2, 560e9),
    ],
)
def test_a_token_takes_the_bytes_of_its_latents(
    fields: dict[str, Any], cached: int, parameters: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    checkpoint = load_checkpoint(str(tmp_path))
    found = describe(checkpoint)
    assert (found.implementation, found.dtype) == ("native", "bfloat16")
    assert found.kv_bytes_per_token == cached
    shapes = expected_tensors(ModelConfig.from_hf(checkpoint)).values()
    counted = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)
    assert abs(counted / parameters - 1) < 0.005
