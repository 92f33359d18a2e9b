"""Random LoRA adapters as PEFT saves them, and the same adapters merged into a model's weights.

Merging is done here from the definition, W + scale * B A, and not through the engine's reader.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    modules: Sequence[str] = ALL_MODULES,
    rank: int = 4,
    alpha: float = 16.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """An adapter of the checkpoint's modules of these names; `config` are further PEFT fields."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in _model(checkpoint).state_dict().items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] not in modules or weight.ndim != 2:
            continue
        outputs, inputs = weight.shape
        own = _pattern(config.get("rank_pattern", {}), path, rank)
        down = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        up = torch.randn(outputs, own, generator=generator) * 0.2
        tensors[f"base_model.model.{path}.lora_A.weight"] = down.to(dtype)
        tensors[f"base_model.model.{path}.lora_B.weight"] = up.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    write_config(folder, modules=modules, r=rank, lora_alpha=alpha, **config)
    return folder


def write_config(folder: Path, *, modules: Sequence[str] = ALL_MODULES, **fields: Any) -> None:
    """adapter_config.json with PEFT's usual fields."""
    usual = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "target_modules": list(modules),
        "use_dora": False,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / "adapter_config.json").write_text(json.dumps({**usual, **fields}))


def save_merged(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """The checkpoint with W + scale * B A in the place of each W that the adapter changes."""
    model = _model(checkpoint)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = dict(model.named_parameters())
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        up = tensors[name.replace("lora_A", "lora_B")]
        rank = _pattern(config["rank_pattern"], path, config["r"])
        alpha = _pattern(config["alpha_pattern"], path, config["lora_alpha"])
        scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
        with torch.no_grad():
            weights[f"{path}.weight"] += scale * up.float() @ down.float()
    model.save_pretrained(folder)
    return folder


def _pattern(values: dict[str, Any], path: str, default: Any) -> Any:
    return next((value for end, value in values.items() if path.endswith(end)), default)


def _model(checkpoint: Path) -> Any:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    return load(checkpoint, dtype=torch.float32).eval()
