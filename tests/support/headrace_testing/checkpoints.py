"""Tiny random checkpoints of real architectures, saved as transformers saves them.

Small vocabularies and wide initial weights give logits that lie far apart, so that a greedy path
has no near-ties. Float32 products of other shapes round differently, which could flip a tie.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner

from .engines import cpu_backends, engine_config, greedy, make_runner, request, run

VOCAB = 256
EOS = 2
MARGIN = 1e-3
Prompt = tuple[int, ...]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "mlp_only_layers": [0],
    "num_hidden_layers": 3,
}
_ROUTED: dict[str, Any] = {
    **_GROUPED,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
# Of sizes that the native step of CPUs supports.
_WHOLE_LATENT = {**_LATENT, "qk_nope_head_dim": 32, "v_head_dim": 16}
# With 32 heads two keys hardly ever have equal scores.
_INDEX: dict[str, Any] = {"index_n_heads": 32, "index_head_dim": 24, "index_topk": 9}
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_FALCON: dict[str, Any] = {
    **_GROUPED,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "lm_head_multiplier": 0.6,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.7, 0.8],
    "key_multiplier": 0.5,
    "attention_out_multiplier": 0.9,
    "attention_in_multiplier": 0.8,
    "ssm_multipliers": [0.8, 1.2, 0.7, 0.9, 0.6],
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 0.7,
}
_NEMOTRON: dict[str, Any] = {
    **_GROUPED,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "time_step_min": 1e-9,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "routed_scaling_factor": 1.7,
}
_MAMBA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 8,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_QWEN35_MOE: dict[str, Any] = {
    **_GROUPED,
    **_DELTA,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
_QWEN_VL: dict[str, Any] = {
    "image_token_id": VOCAB - 1,
    "video_token_id": VOCAB - 2,
    "vision_start_token_id": VOCAB - 3,
    "vision_end_token_id": VOCAB - 4,
    "tie_word_embeddings": False,
}
# A token is 8 x 8 pixels, and an image has at most 64 tokens.
_QWEN_IMAGES: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}
_VIDEOS: dict[str, Any] = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 512, "longest_edge": 4096},
}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
}
_QWEN35_TOWER: dict[str, Any] = {
    **_QWEN_TOWER,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
_QWEN35_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}


_LLAMA4: dict[str, Any] = {
    **_GROUPED,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 6,
    "moe_layers": [1, 2],
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 12,
    "attn_scale": 0.7,
    "floor_scale": 5,
}


# A square is 16 x 16 pixels and has 4 tokens.
_IDEFICS3: dict[str, Any] = {
    "text_config": {**_GROUPED, "model_type": "llama"},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
    "image_token_id": VOCAB - 1,
    "tie_word_embeddings": False,
}
_SQUARES: dict[str, Any] = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 48},
    "max_image_size": {"longest_edge": 16},
}
_AROUND_SQUARES = (
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)


_GEMMA4: dict[str, Any] = {
    "text_config": {
        **_GROUPED,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": False,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 128,
    },
    # The padding, whose embedding these tokens have in text, too.
    "image_token_id": 0,
    "boi_token_id": VOCAB - 2,
    "eoi_token_id": VOCAB - 3,
    # Outside the vocabulary, for the same reason.
    "video_token_id": VOCAB,
    "audio_token_id": VOCAB + 1,
}
# An image has at most 70 tokens, the fewest that the processor allows.
_GEMMA4_IMAGES: dict[str, Any] = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
}


# One to three tiles of 16 x 16 pixels in each direction.
# A vision tower of 16 tokens.
SIGLIP_TOWER: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
_CANVASES = [[high, wide] for high in (16, 32, 48) for wide in (16, 32, 48)]


_GLM4V: dict[str, Any] = {
    "image_token_id": VOCAB - 1,
    "video_token_id": VOCAB - 2,
    "image_start_token_id": VOCAB - 3,
    "image_end_token_id": VOCAB - 4,
    "video_start_token_id": VOCAB - 5,
    "video_end_token_id": VOCAB - 6,
    "tie_word_embeddings": False,
    "text_config": {
        **_GROUPED,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 2, 1],
        },
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "image_size": 32,
        "patch_size": 4,
    },
}
# An image counts twice.
_GLM_IMAGES: dict[str, Any] = {
    **_QWEN_IMAGES,
    "image_processor_type": "Glm4vImageProcessor",
    "size": {"shortest_edge": 128, "longest_edge": 8192},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The name of a transformers config class, and the options of the tiny model. `renamed` maps
    what transformers writes into names of tensors to what published files have there. `processor`
    is its preprocessor_config.json, if it reads images, for which the tokenizer has `tokens`, and
    `videos` its video_preprocessor_config.json."""

    config: str
    options: dict[str, Any]
    renamed: dict[str, str] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    videos: dict[str, Any] = field(default_factory=dict)


SHAPES: dict[str, Shape] = {
    "llama": Shape("LlamaConfig", {**_GROUPED, "tie_word_embeddings": False}),
    "llama3-rope": Shape(
        "LlamaConfig",
        {
            **_GROUPED,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama4": Shape("Llama4TextConfig", _LLAMA4),
    "llama4-two": Shape(
        "Llama4TextConfig",
        {
            **_LLAMA4,
            "num_experts_per_tok": 2,
            "moe_layers": None,
            "no_rope_layers": [1, 1, 0, 1],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
        },
    ),
    "llama4-multimodal": Shape(
        "Llama4Config",
        {
            "text_config": _LLAMA4,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": VOCAB - 1,
            "boi_token_index": VOCAB - 2,
            "eoi_token_index": VOCAB - 3,
        },
        processor={
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": 16, "width": 16},
            "max_patches": 4,
        },
        tokens=(
            *("<|image|>", "<|image_start|>", "<|image_end|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
    ),
    "mistral": Shape("MistralConfig", {**_GROUPED, "sliding_window": 12}),
    "qwen2": Shape("Qwen2Config", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen2-window": Shape(
        "Qwen2Config",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": Shape("Qwen3Config", {**_GROUPED, "head_dim": 32}),
    "qwen2-vl": Shape(
        "Qwen2VLConfig",
        {
            **_QWEN_VL,
            "text_config": {
                **_GROUPED,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
        },
        processor=_QWEN_IMAGES,
    ),
    "qwen2.5-vl": Shape(
        "Qwen2_5_VLConfig",
        {
            **_QWEN_VL,
            "text_config": {
                **_GROUPED,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [2, 3, 3],
                },
            },
            "vision_config": {
                **_QWEN_TOWER,
                "out_hidden_size": 64,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        processor=_QWEN_IMAGES,
    ),
    "qwen3-vl": Shape(
        "Qwen3VLConfig",
        {
            **_QWEN_VL,
            "text_config": {
                **_GROUPED,
                "num_hidden_layers": 3,
                "head_dim": 32,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [6, 5, 5],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                **_QWEN_TOWER,
                "out_hidden_size": 64,
                "num_position_embeddings": 36,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        processor=_QWEN_IMAGES,
        videos=_VIDEOS,
    ),
    "gemma2": Shape(
        "Gemma2Config",
        {
            **_GROUPED,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 10,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma": Shape("GemmaConfig", {**_GROUPED, "head_dim": 32}),
    "gemma3": Shape(
        "Gemma3TextConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "linear",
                    "rope_theta": 100000.0,
                    "factor": 4.0,
                },
            },
        },
    ),
    "gemma3-multimodal": Shape(
        "Gemma3Config",
        {
            "text_config": {
                **_GROUPED,
                "num_hidden_layers": 3,
                "head_dim": 32,
                "sliding_window": 10,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 48,
                "patch_size": 6,
            },
            "mm_tokens_per_image": 16,
            "image_token_index": VOCAB - 1,
            "boi_token_index": VOCAB - 2,
            "eoi_token_index": VOCAB - 3,
        },
        processor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 48, "width": 48},
        },
    ),
    "gemma4-multimodal": Shape("Gemma4Config", _GEMMA4, processor=_GEMMA4_IMAGES),
    "gemma4-videos": Shape(
        "Gemma4Config",
        {**_GEMMA4, "video_token_id": VOCAB - 4},
        processor=_GEMMA4_IMAGES,
        videos={"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70},
    ),
    # Layers that share KV, and embeddings for each layer.
    "gemma4-small": Shape(
        "Gemma4Config",
        {
            **_GEMMA4,
            "text_config": {
                **_GEMMA4["text_config"],
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCAB,
                "use_bidirectional_attention": None,
                "attention_k_eq_v": False,
                "enable_moe_block": False,
            },
        },
        processor=_GEMMA4_IMAGES,
    ),
    "gpt_neox": Shape("GPTNeoXConfig", {**_SIZES, "tie_word_embeddings": False}),
    "smollm3": Shape(
        "SmolLM3Config", {**_GROUPED, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}
    ),
    "olmo2": Shape("Olmo2Config", _GROUPED),
    "olmo3": Shape(
        "Olmo3Config",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_scaling": _YARN,
        },
    ),
    "granite": Shape(
        "GraniteConfig",
        {
            **_GROUPED,
            "rms_norm_eps": 0.05,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 1.7,
        },
    ),
    "ministral3": Shape(
        "Ministral3Config",
        {
            **_GROUPED,
            "head_dim": 32,
            "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5},
        },
    ),
    "kimi-k25-multimodal": Shape(
        "Kimi_K25Config",
        {
            "text_config": {
                **_ROUTED,
                **_WHOLE_LATENT,
                "n_group": 1,
                "topk_group": 1,
                "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "projection_hidden_size": 32,
            # Outside the vocabulary: transformers replaces these in prompts of text, too.
            "image_token_id": VOCAB,
            "video_token_id": VOCAB + 1,
            "tie_word_embeddings": False,
        },
        {"language_model.model.blocks.": "language_model.model.layers.", "model.mm_": "mm_"},
    ),
    "mistral3-multimodal": Shape(
        "Mistral3Config",
        {
            "text_config": {
                **_GROUPED,
                "model_type": "ministral3",
                "head_dim": 32,
                "sliding_window": None,
                "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5},
            },
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 16,
                "image_size": 64,
                "patch_size": 4,
            },
            "image_token_index": VOCAB - 1,
            "spatial_merge_size": 2,
        },
        processor={"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}},
        tokens=("[IMG_BREAK]", "[IMG_END]"),
    ),
    "glm4v": Shape("Glm4vConfig", _GLM4V, processor=_GLM_IMAGES, videos=_VIDEOS),
    "glm46v": Shape(
        "Glm46VConfig",
        {
            **_GLM4V,
            "text_config": {**_GLM4V["text_config"], "model_type": "glm4v_text"},
            "vision_config": {**_GLM4V["vision_config"], "model_type": "glm4v_vision"},
        },
        processor={**_GLM_IMAGES, "image_processor_type": "Glm46VImageProcessor"},
        videos=_VIDEOS,
    ),
    "glm4v-moe": Shape(
        "Glm4vMoeConfig",
        {
            **_GLM4V,
            "text_config": {
                **_ROUTED,
                "attention_bias": True,
                "rope_parameters": _GLM4V["text_config"]["rope_parameters"],
            },
        },
        processor=_GLM_IMAGES,
        videos=_VIDEOS,
    ),
    "llava-onevision": Shape(
        "LlavaOnevisionConfig",
        {
            "text_config": {**_GROUPED, "model_type": "qwen2"},
            "vision_config": SIGLIP_TOWER,
            "image_token_index": VOCAB - 1,
            "video_token_index": VOCAB - 2,
            "image_grid_pinpoints": _CANVASES,
            "vision_aspect_ratio": "anyres_max_2",
        },
        processor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 16, "width": 16},
            "image_grid_pinpoints": _CANVASES,
        },
    ),
    "smolvlm": Shape(
        "SmolVLMConfig",
        _IDEFICS3,
        processor={**_SQUARES, "video_sampling": {"fps": 1, "max_frames": 64}},
        tokens=_AROUND_SQUARES,
    ),
    "idefics3": Shape("Idefics3Config", _IDEFICS3, processor=_SQUARES, tokens=_AROUND_SQUARES),
    "gpt2": Shape("GPT2Config", {**_SIZES, "tie_word_embeddings": False}),
    "glm": Shape("GlmConfig", {**_GROUPED, "head_dim": 32}),
    "glm4": Shape("Glm4Config", {**_GROUPED, "head_dim": 32}),
    "exaone4": Shape(
        "Exaone4Config",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ernie4_5": Shape("Ernie4_5Config", {**_GROUPED, "head_dim": 32, "use_bias": True}),
    "seed_oss": Shape("SeedOssConfig", {**_GROUPED, "head_dim": 32}),
    "phi3": Shape("Phi3Config", {**_GROUPED, "sliding_window": 14}),
    "phi3-partial": Shape(
        "Phi3Config",
        {
            **_GROUPED,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "mixtral": Shape("MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "gpt-oss": Shape(
        "GptOssConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 10,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2-moe": Shape("Qwen2MoeConfig", {**_GROUPED, **_EXPERTS, "norm_topk_prob": True}),
    "glm4-moe": Shape(
        "Glm4MoeConfig", {**_ROUTED, "head_dim": 32, "use_qk_norm": True, "attention_bias": True}
    ),
    "solar-open": Shape("SolarOpenConfig", {**_ROUTED, "head_dim": 32, "n_shared_experts": 2}),
    "dots1": Shape(
        "Dots1Config",
        {**_ROUTED, "head_dim": 32, "sliding_window": 10, "max_window_layers": 2},
    ),
    "hunyuan": Shape(
        "HunYuanDenseV1Config",
        {
            **_GROUPED,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "factor": 1.0,
                "alpha": 50.0,
            },
        },
    ),
    "hunyuan-moe": Shape(
        "HunYuanMoEV1Config", {**_GROUPED, "head_dim": 32, "num_experts": 6, "moe_topk": 2}
    ),
    "deepseek-v2": Shape(
        "DeepseekV2Config",
        {
            **_ROUTED,
            **_WHOLE_LATENT,
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v2-lite": Shape(
        "DeepseekV2Config",
        {**_ROUTED, **_WHOLE_LATENT, "q_lora_rank": None, "norm_topk_prob": False},
    ),
    "deepseek-v3": Shape(
        "DeepseekV3Config",
        {
            **_ROUTED,
            **_WHOLE_LATENT,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek-v32": Shape(
        "DeepseekV32Config",
        {
            **_ROUTED,
            **_LATENT,
            **_INDEX,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "glm-moe-dsa": Shape("GlmMoeDsaConfig", {**_ROUTED, **_LATENT, **_INDEX}),
    "glm-moe-dsa-shared": Shape(
        "GlmMoeDsaConfig",
        {
            **_ROUTED,
            **_LATENT,
            **_INDEX,
            "num_hidden_layers": 5,
            "indexer_types": ["full", "full", "shared", "shared", "full"],
        },
    ),
    "longcat-flash": Shape(
        "LongcatFlashConfig",
        {
            **{name: value for name, value in _SIZES.items() if name != "num_hidden_layers"},
            **_LATENT,
            "num_layers": 2,
            "head_dim": 16,
            "moe_topk": 3,
            "n_routed_experts": 8,
            "zero_expert_num": 4,
            "expert_ffn_hidden_size": 48,
            "routed_scaling_factor": 1.7,
        },
    ),
    "glm4-moe-lite": Shape("Glm4MoeLiteConfig", {**_ROUTED, **_WHOLE_LATENT}),
    "minimax-m2": Shape(
        "MiniMaxM2Config",
        {
            **_GROUPED,
            "head_dim": 32,
            "rotary_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "mimo-v2": Shape(
        "MiMoV2FlashConfig",
        {
            **_ROUTED,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "v_head_dim": 20,
            "sliding_window": 10,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        },
    ),
    "olmoe": Shape("OlmoeConfig", {**_GROUPED, "num_experts": 6, "num_experts_per_tok": 2}),
    "ernie4_5-moe": Shape(
        "Ernie4_5_MoeConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "qwen3-moe": Shape("Qwen3MoeConfig", {**_GROUPED, **_EXPERTS, "head_dim": 32}),
}
# The decoders with recurrent layers.
HYBRID_SHAPES: dict[str, Shape] = {
    "kimi-linear": Shape(
        "KimiLinearConfig",
        {
            **_SIZES,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 24,
            "v_head_dim": 20,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "num_local_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
        },
    ),
    "lfm2": Shape(
        "Lfm2Config",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_multiple_of": 16,
        },
    ),
    "lfm2-moe": Shape(
        "Lfm2MoeConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.7,
        },
    ),
    "mamba": Shape("MambaConfig", {**_MAMBA, "use_bias": True}),
    # The published config.json has an inner size that `expand` contradicts.
    "falcon-mamba": Shape(
        "FalconMambaConfig",
        {**_MAMBA, "expand": 16, "intermediate_size": 96, "tie_word_embeddings": False},
    ),
    "mamba2": Shape(
        "Mamba2Config",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "bos_token_id": 1,
            "eos_token_id": EOS,
            "pad_token_id": 0,
        },
    ),
    "nemotron-h": Shape("NemotronHConfig", _NEMOTRON),
    "nemotron-h-latent": Shape(
        "NemotronHConfig", {**_NEMOTRON, "moe_latent_size": 32, "use_bias": True, "mlp_bias": True}
    ),
    "qwen3-next": Shape(
        "Qwen3NextConfig",
        {
            **_GROUPED,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 32,
            **_DELTA,
        },
    ),
    "bamba": Shape(
        "BambaConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "attn_layer_indices": [2],
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_n_heads": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "jamba": Shape(
        "JambaConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
        },
    ),
    "falcon-h1": Shape("FalconH1Config", _FALCON),
    "falcon-h1-norm": Shape(
        "FalconH1Config",
        {
            **_FALCON,
            "num_hidden_layers": 2,
            "mamba_n_groups": 1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
        },
    ),
    "granite-hybrid": Shape(
        "GraniteMoeHybridConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "position_embedding_type": "nope",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "qwen3_5": Shape(
        "Qwen3_5TextConfig", {**_GROUPED, "num_hidden_layers": 4, "head_dim": 32, **_DELTA}
    ),
    "qwen3_5-multimodal": Shape(
        "Qwen3_5Config",
        {
            **_QWEN_VL,
            "text_config": {
                **_GROUPED,
                **_DELTA,
                "num_hidden_layers": 4,
                "head_dim": 32,
                "rope_parameters": _QWEN35_ROPE,
            },
            "vision_config": _QWEN35_TOWER,
        },
        processor=_QWEN_IMAGES,
        videos=_VIDEOS,
    ),
    "qwen3_5-moe": Shape("Qwen3_5MoeTextConfig", _QWEN35_MOE),
    "qwen3_5-moe-multimodal": Shape(
        "Qwen3_5MoeConfig",
        {
            **_QWEN_VL,
            "text_config": {**_QWEN35_MOE, "rope_parameters": _QWEN35_ROPE},
            "vision_config": _QWEN35_TOWER,
        },
        processor=_QWEN_IMAGES,
        videos=_VIDEOS,
    ),
}
HYBRID = tuple(HYBRID_SHAPES)
# Decoders whose attention, layers or mixtures are unlike those of Llama.
UNUSUAL = (
    "llama4",
    "llama4-two",
    "gpt-oss",
    "glm4-moe",
    "solar-open",
    "dots1",
    "minimax-m2",
    "mimo-v2",
    "olmoe",
    "ernie4_5-moe",
    "hunyuan",
    "hunyuan-moe",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "deepseek-v32",
    "glm-moe-dsa-shared",
    "longcat-flash",
    "glm4-moe-lite",
)
SHAPES |= HYBRID_SHAPES

_LINES = (
    "the cat sat on the mat and looked at the moon",
    "a headrace feeds the wheels of a mill from the stream",
    "one two three four five six seven eight nine ten",
    "tokens flow through blocks of memory, page after page",
)


def make_config(name: str, **changes: Any) -> transformers.PretrainedConfig:
    shape = SHAPES[name]
    config: transformers.PretrainedConfig = getattr(transformers, shape.config)(
        **{**shape.options, **changes}
    )
    return config


def make_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model in float32 in which every layer matters to the output."""
    config = make_config(name, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _auto_class(config).from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        randomise(model)
    return model.eval()


def randomise(model: Any) -> None:
    """Gives all parameters random values that matter to the output."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _initialise(parameter_name, parameter)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))


def save_checkpoint(
    folder: Path,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    shard: str = "1GB",
    published: bool = True,
    **changes: Any,
) -> Path:
    """Saves model and tokenizer into `folder`; `shard` is the largest size of one file. Without
    `published` tensors have the names and shapes of transformers' modules."""
    model = make_model(name, **changes)
    if dtype is not torch.float32:  # Casts rotations of complex numbers, too.
        model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard, save_original_format=published)
    if published and SHAPES[name].renamed:
        _rename(folder / "model.safetensors", SHAPES[name].renamed)
    if SHAPES[name].processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(SHAPES[name].processor))
    if SHAPES[name].videos:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(SHAPES[name].videos))
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(each) for each in SHAPES[name].tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _rename(file: Path, renamed: dict[str, str]) -> None:
    tensors = load_file(file)
    for part, other in renamed.items():
        tensors = {name.replace(part, other): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, {"format": "pt"})


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of a few hundred tokens, trained on a few lines."""
    return Tokenizer.from_str(_trained())


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(set("".join(_LINES)) | {"Ġ"}),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    serialized: str = tokenizer.to_str()
    return serialized


@dataclass(frozen=True, slots=True)
class GreedyPath:
    """`margin` is the smallest distance between the two best logits of a token."""

    prompt: Prompt
    output: tuple[int, ...]
    margin: float


class Reference:
    """Greedy generation of transformers on a checkpoint.

    The engine proposes paths, many at once, and transformers confirms them in one forward pass, in
    which every token must have the largest logit. transformers generates the paths that it does not
    confirm.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._folder = folder
        load = _auto_class(transformers.AutoConfig.from_pretrained(folder)).from_pretrained
        self.model = load(folder, dtype=dtype, attn_implementation="eager").eval()
        self._known: dict[tuple[Prompt, int], GreedyPath] = {}
        self._logits: dict[Prompt, torch.Tensor] = {}

    @cached_property
    def _runner(self) -> ModelRunner:
        backend = cpu_backends()[-1]
        return make_runner(self._folder, attention_backend=backend, max_num_batched_tokens=512)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [len(ids), vocabulary], computed once."""
        known = self._logits.get(tuple(ids))
        if known is None:
            known = self._logits[tuple(ids)] = self.batch_logits([ids])[0]
        return known

    def batch_logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """float32 [rows, tokens, vocabulary], in one forward pass. Tokens are added to the ends of
        shorter rows, where no token of the row sees them."""
        longest = max(map(len, rows))
        ids = [[*row, *[3] * (longest - len(row))] for row in rows]
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor(ids)).logits.float()
        return logits

    def path(self, prompt: Prompt, length: int) -> GreedyPath:
        """The path of `length` tokens."""
        (found,) = self._paths([prompt], length)
        return found

    def clear_paths(
        self,
        count: int,
        length: int,
        prompt_length: Callable[[int], int] = lambda index: 3 + (index * 7) % 40,
        prefix: Callable[[int], Prompt] = lambda _: (),
    ) -> list[GreedyPath]:
        """Greedy paths of random prompts without near-ties: none closer than MARGIN.

        The first paths are the same whatever their count, and are computed once.
        """
        generator = torch.Generator().manual_seed(length)
        found: list[GreedyPath] = []
        while len(found) < count:
            drawn = []
            for index in range(len(found), count):
                size = (prompt_length(index),)
                tail = torch.randint(3, VOCAB, size, generator=generator).tolist()
                drawn.append(((*prefix(index), *tail), generator.get_state()))
            paths = self._paths([prompt for prompt, _ in drawn], length)
            for path, (_, state) in zip(paths, drawn, strict=True):
                if path.margin <= MARGIN:
                    generator.set_state(state)
                    break
                found.append(path)
        return found

    def _paths(self, prompts: Sequence[Prompt], length: int) -> list[GreedyPath]:
        new = [prompt for prompt in prompts if (prompt, length) not in self._known]
        if new:
            engine = Engine(engine_config(self._folder, max_num_batched_tokens=512), self._runner)
            requests = [request(str(at), one, greedy(length)) for at, one in enumerate(new)]
            outputs = run(engine, requests)
            proposed = [tuple(outputs[str(at), 0].token_ids) for at in range(len(new))]
            confirmed = self._confirm(list(zip(new, proposed, strict=True)))
            for prompt, found in zip(new, confirmed, strict=True):
                self._known[prompt, length] = found or self._generate(prompt, length)
        return [self._known[prompt, length] for prompt in prompts]

    def _confirm(
        self, proposed: Sequence[tuple[Prompt, tuple[int, ...]]]
    ) -> list[GreedyPath | None]:
        """The path of each prompt and output; None where the output is not that of transformers."""
        logits = self.batch_logits([(*prompt, *output[:-1]) for prompt, output in proposed]).clone()
        logits[..., self.model.generation_config.eos_token_id] = -math.inf
        found: list[GreedyPath | None] = []
        for (prompt, output), row in zip(proposed, logits, strict=True):
            best = row[len(prompt) - 1 :][: len(output)].topk(2)
            margin = float((best.values[:, 0] - best.values[:, 1]).min())
            agrees = best.indices[:, 0].tolist() == list(output)
            found.append(GreedyPath(prompt, output, margin) if agrees else None)
        return found

    def _generate(self, prompt: Prompt, length: int) -> GreedyPath:
        with torch.inference_mode():
            result = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        best = torch.stack(result.scores).squeeze(1).topk(2).values
        output = tuple(result.sequences[0, len(prompt) :].tolist())
        return GreedyPath(prompt, output, float((best[:, 0] - best[:, 1]).min()))


def _auto_class(config: Any) -> Any:
    """Returns the class for multimodal models if there is a vision tower. For some of these models,
    the class for causal models would make only the decoder."""
    causal: Any = transformers.AutoModelForCausalLM
    multimodal: Any = transformers.AutoModelForImageTextToText
    return multimodal if hasattr(config, "vision_config") else causal


def _initialise(name: str, parameter: torch.Tensor) -> None:
    if "norm" in name or ".ln_" in name:
        parameter.add_(0.1 * torch.randn_like(parameter))
    elif "sinks" in name:
        parameter.copy_(2.0 * torch.randn_like(parameter))
    elif parameter.ndim == 1:
        parameter.copy_(0.3 * torch.randn_like(parameter))
    elif "embed" in name or "lm_head" in name:
        parameter.copy_(torch.randn_like(parameter) * 0.5)
    else:
        parameter.copy_(torch.randn_like(parameter) * 1.5 / math.sqrt(parameter.shape[-1]))
