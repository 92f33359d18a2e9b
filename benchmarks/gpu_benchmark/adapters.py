"""Writes LoRA adapters with random values in PEFT's format, for the shapes that gpu.py measures."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .shapes import Shape

ALPHA = 16


def write_adapters(folder: Path, shape: Shape, count: int, rank: int) -> dict[str, str]:
    """Writes folders of `count` adapters on all linear layers; returns them by name.

    All share one file of matrices, since the values do not affect the measurements.
    """
    weights = folder / "adapter_model.safetensors"
    save_file(_matrices(shape, rank), weights)
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "bias": "none",
        "target_modules": [name for name, _, _ in _linears(shape)],
    }  # fmt: skip
    made = {}
    for number in range(count):
        own = folder / f"adapter-{number}"
        own.mkdir()
        (own / "adapter_config.json").write_text(json.dumps(config))
        (own / weights.name).symlink_to(weights)
        made[own.name] = str(own)
    return made


def _linears(shape: Shape) -> list[tuple[str, int, int]]:
    """(module, inputs, outputs) of a layer."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.inner
    return [
        ("self_attn.q_proj", hidden, query),
        ("self_attn.k_proj", hidden, key),
        ("self_attn.v_proj", hidden, key),
        ("self_attn.o_proj", query, hidden),
        ("mlp.gate_proj", hidden, inner),
        ("mlp.up_proj", hidden, inner),
        ("mlp.down_proj", inner, hidden),
    ]


def _matrices(shape: Shape, rank: int) -> dict[str, torch.Tensor]:
    found = {}
    for layer in range(shape.layers):
        for module, inputs, outputs in _linears(shape):
            name = f"base_model.model.model.layers.{layer}.{module}"
            found[f"{name}.lora_A.weight"] = _random(rank, inputs)
            found[f"{name}.lora_B.weight"] = _random(outputs, rank)
    return found


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).mul_(0.01).bfloat16()
