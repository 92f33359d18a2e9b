"""The models of offline.py: random weights in the shapes of families that are served.

Each entry of MODELS is a config class of transformers and its fields.
"""

from pathlib import Path
from typing import Any

VOCAB_SIZE = 32_000
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # 42 M parameters
    "llama": (
        "LlamaConfig",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
    ),
    # DeepSeek-V2-Lite's heads and latents, fewer and smaller experts and layers: 0.4 B parameters
    "latent": (
        "DeepseekV2Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "moe_intermediate_size": 384,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 32,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    # Qwen 3.5: three gated delta nets for each layer with attention: 0.4 B parameters
    "recurrent": (
        "Qwen3_5TextConfig",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 20,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
}


def make_model(folder: Path, name: str = "llama") -> None:
    """Saves a model of MODELS in bfloat16, with random weights, whose greedy output is not
    trivial."""
    import torch
    import transformers

    torch.manual_seed(0)
    config_class, fields = MODELS[name]
    config: Any = getattr(transformers, config_class)(**_COMMON, **fields)
    _make_tokenizer().save_pretrained(folder)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def _make_tokenizer() -> Any:
    """A tokenizer with one word per token, which suffices to turn any output into text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=words, eos_token="w2", unk_token="w0")
