"""A tiny checkpoint as a GGUF file, and the same checkpoint with the weights of that file."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from .checkpoints import save_checkpoint
from .gguf_files import TypeOf, byte_level_values, model_values, pack, read_tokenizer, write_gguf

FILE = "model.safetensors"
# Rows of 256 elements, which the blocks of K-quants have.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
ARCHITECTURES = {
    "llama": "llama",
    "llama3-rope": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2-moe": "qwen2moe",
    "qwen3-moe": "qwen3moe",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}


def save_gguf(
    folder: Path, name: str, type_of: TypeOf = lambda _: "F32", **changes: Any
) -> tuple[Path, Path]:
    """Returns a GGUF file of a tiny checkpoint, and the folder of the checkpoint whose weights are
    what the file holds."""
    whole = save_checkpoint(folder / "whole", name, **(SIZES | changes))
    config = json.loads((whole / "config.json").read_text())
    tensors = load_file(whole / FILE)
    architecture = ARCHITECTURES[name]
    permuted = {}
    if architecture == "llama":
        permuted = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    written: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for published, tensor in tensors.items():
        own, values = llama_name(published), tensor.numpy()
        kind = type_of(own) if values.ndim > 1 else "F32"
        rounded = dequantize(pack(values, kind), GGMLQuantizationType[kind])
        tensors[published] = torch.from_numpy(rounded.reshape(values.shape).copy())
        for letter, heads in permuted.items():
            if f"attn_{letter}." in own:
                values = permute(values, heads)
        if "_exps." in own:
            stacks.setdefault(own, []).append(values)
        else:
            written[own] = values
    written |= {own: np.stack(parts) for own, parts in stacks.items()}
    written |= rope_factors(config)
    save_file(tensors, whole / FILE, {"format": "pt"})
    tokens = byte_level_values(
        read_tokenizer(whole), "gpt-2", config["vocab_size"], eos_token_id=2, bos_token_id=1
    )
    path = folder / f"{name}.gguf"
    write_gguf(path, model_values(config, architecture) | tokens, written, type_of)
    return path, whole


def llama_name(published: str) -> str:
    """llama.cpp's name of a tensor; all experts of a layer have the same."""
    name = published
    if ".experts." in name:
        head, _, tail = name.partition(".experts.")
        layer = head.split(".")[2]
        return f"blk.{layer}.{_EXPERTS[tail.split('.')[1]]}.weight"
    for usual, own in _NAMES.items():
        name = name.replace(f"{usual}.", f"{own}.")
    return name


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Interleaves the halves of each head, which llama.cpp rotates in neighbouring pairs."""
    return np.ascontiguousarray(
        rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def rope_factors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensor that has the scaling of Llama 3's rotary embedding."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return {}
    dim, context = config["head_dim"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    found = []
    for index in range(0, dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (index / dim)
        smooth = min(1.0, max(0.0, (context / length - low) / (high - low)))
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(found, dtype=np.float32)}
