"""The config.json of a GGUF file: its metadata, in the words of published checkpoints."""

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import TokenizerError
from .header import FLOATS, Header
from .metadata import Metadata

# Factors of the rotary embedding's frequencies, which files of Llama 3 have as a tensor.
ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Keys that change what a model computes, and that the engine's families here do not have.
_UNSUPPORTED = (
    "attention.clamp_kqv",
    "attention.scale",
    "attention.sliding_window",
    "embedding_scale",
    "expert_group_count",
    "expert_weights_scale",
    "logit_scale",
    "residual_scale",
    "rope.dimension_sections",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
)
# The number of the function that makes scores of a router's logits.
_SOFTMAX = 1


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture's published class. A mixture's number of experts is in `experts_field`, and
    `fields` is what its config.json has beside sizes."""

    architecture: str
    model_type: str
    experts_field: str = ""
    fields: Mapping[str, Any] | None = None


# Architectures by their names in GGUF files; Mistral's models are called llama there.
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama"),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM", "qwen2_moe", "num_experts", {"norm_topk_prob": False}
    ),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", "num_experts", {"norm_topk_prob": True}),
}
_MIXTRAL = Family("MixtralForCausalLM", "mixtral", "num_local_experts", {})


def make_config(header: Header) -> dict[str, Any]:
    """The content of config.json. Raises TokenizerError for the first key that is missing, broken
    or not supported."""
    metadata, name = header.metadata, header.architecture
    family = FAMILIES.get(name)
    if family is None:
        raise metadata.error("general.architecture", f"one of {', '.join(FAMILIES)}")
    _refuse_others(metadata, name)
    experts = metadata.count(f"{name}.expert_count", 0)
    if experts and name == "llama":
        family = _MIXTRAL
    heads = metadata.integer(f"{name}.attention.head_count")
    hidden = metadata.integer(f"{name}.embedding_length")
    head_dim = metadata.integer(f"{name}.attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{name}.{key}", head_dim) != head_dim:
            raise metadata.error(f"{name}.{key}", f"the width of a head ({head_dim})")
    context = metadata.integer(f"{name}.context_length")
    if EMBEDDING not in header.tensors:
        raise TokenizerError(f"{metadata.path}: the tensor {EMBEDDING} is missing")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": metadata.integer(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "rope_parameters": _rope(header, name, head_dim, context),
        "dtype": _dtype(header),
    }
    if experts:
        config |= _experts(metadata, name, family, experts)
    types = sorted({tensor.type for tensor in header.tensors.values()} - set(FLOATS))
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return config


def _refuse_others(metadata: Metadata, name: str) -> None:
    """Raises TokenizerError for keys of models that compute otherwise."""
    for key in _UNSUPPORTED:
        if f"{name}.{key}" in metadata:
            raise TokenizerError(f"{metadata.path}: {name}.{key} is not supported")
    if not metadata.flag(f"{name}.attention.causal", True):
        raise metadata.error(f"{name}.attention.causal", "true: encoders are not read")
    if metadata.integer(f"{name}.expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise metadata.error(f"{name}.expert_gating_func", f"{_SOFTMAX} (softmax)")


def _experts(metadata: Metadata, name: str, family: Family, count: int) -> dict[str, Any]:
    inner = metadata.integer(f"{name}.feed_forward_length")
    found = {
        family.experts_field: count,
        "num_experts_per_tok": metadata.integer(f"{name}.expert_used_count"),
        "moe_intermediate_size": metadata.integer(f"{name}.expert_feed_forward_length", inner),
        **(family.fields or {}),
    }
    shared = f"{name}.expert_shared_feed_forward_length"
    if shared in metadata:
        found["shared_expert_intermediate_size"] = metadata.integer(shared)
    return found


def _rope(header: Header, name: str, head_dim: int, context: int) -> dict[str, Any]:
    metadata = header.metadata
    theta = {"rope_theta": metadata.number(f"{name}.rope.freq_base", 10_000.0)}
    kind = metadata.text(f"{name}.rope.scaling.type", "none")
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise metadata.error(f"{name}.rope.scaling.type", f"none beside {ROPE_FACTORS}")
        factors = _rope_factors(header, head_dim)
        return theta | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    if kind == "none":
        return theta | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise metadata.error(f"{name}.rope.scaling.type", "none, linear or yarn")
    factor = {"factor": metadata.number(f"{name}.rope.scaling.factor")}
    if kind == "linear":
        return theta | factor | {"rope_type": "linear"}
    original = metadata.integer(f"{name}.rope.scaling.original_context_length", context)
    found: dict[str, Any] = {"rope_type": "yarn", "original_max_position_embeddings": original}
    for key in ("beta_fast", "beta_slow"):
        if f"{name}.rope.scaling.yarn_{key}" in metadata:
            found[key] = metadata.number(f"{name}.rope.scaling.yarn_{key}")
    return theta | factor | found


def _rope_factors(header: Header, head_dim: int) -> list[float]:
    """The divisors of the frequencies, from the one tensor that is read here."""
    stored, path = header.tensors[ROPE_FACTORS], header.path
    if stored.type != "F32" or stored.shape != (head_dim // 2,):
        raise TokenizerError(f"{path}: {ROPE_FACTORS} must hold {head_dim // 2} numbers as F32")
    with path.open("rb") as file:
        file.seek(stored.start)
        content = file.read(4 * stored.shape[0])
    if len(content) < 4 * stored.shape[0]:
        raise TokenizerError(f"{path} is cut short within {ROPE_FACTORS}")
    factors = list(struct.unpack(f"<{stored.shape[0]}f", content))
    if not all(0 < factor < math.inf for factor in factors):
        raise TokenizerError(f"{path}: {ROPE_FACTORS} must hold numbers above 0")
    return factors


def _dtype(header: Header) -> str:
    """The dtype in which to compute: that of most matrices, and bfloat16 for quantised ones."""
    types = Counter(each.type for each in header.tensors.values() if len(each.shape) > 1)
    most = types.most_common(1)[0][0]
    return {"F32": "float32", "F64": "float32", "F16": "float16"}.get(most, "bfloat16")
