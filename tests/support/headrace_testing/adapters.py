"""Random LoRA adapters as PEFT saves them, and the same adapters merged into a model's weights.

Merging is done here from the definition, W + scale * B A, and not through the engine's reader.
"""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file

ExpertForm = Literal["apart", "joined"]
Tensors = dict[str, torch.Tensor]
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
    experts: ExpertForm | None = None,
    **config: Any,
) -> Path:
    """Saves an adapter of the checkpoint's modules with these names, and of its experts.

    `experts` says whether each expert has its own matrices or all share joined ones; None leaves
    experts as they are. `config` are further PEFT fields.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in _model(checkpoint).state_dict().items():
        path = name.removesuffix(".weight")
        if weight.ndim == 3 and experts is not None and ".experts." in path:
            if experts == "joined":
                made = _joined(path, weight, rank, generator)
            else:
                ranks = config.get("rank_pattern", {})
                made = _apart(path, weight, rank, ranks, generator)
            tensors |= {f"base_model.model.{key}": value.to(dtype) for key, value in made.items()}
        if path.rpartition(".")[2] not in modules or weight.ndim != 2 or _left_out(path, config):
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


def _left_out(path: str, config: dict[str, Any]) -> bool:
    layers = config.get("layers_to_transform")
    return layers is not None and not any(f"layers.{layer}." in path for layer in layers)


def _joined(path: str, weight: torch.Tensor, rank: int, seed: torch.Generator) -> Tensors:
    """An adapter of a parameter [experts, out, in]. PEFT wraps down_proj around the other one."""
    count, outputs, inputs = weight.shape
    block, _, parameter = path.rpartition(".")
    module = block if parameter == "down_proj" else f"{block}.base_layer"
    return {
        f"{module}.lora_A.weight": torch.randn(rank * count, inputs, generator=seed) * inputs**-0.5,
        f"{module}.lora_B.weight": torch.randn(outputs, rank * count, generator=seed) * 0.2,
    }


def _apart(
    path: str, weight: torch.Tensor, usual: int, ranks: dict[str, int], seed: torch.Generator
) -> Tensors:
    """Adapters of all experts except the first, for gate and up, or for one of up and down."""
    count, outputs, inputs = weight.shape
    block, _, parameter = path.rpartition(".")
    names = ("gate_proj", "up_proj") if parameter == "gate_up_proj" else (parameter,)
    tensors: Tensors = {}
    for expert, name in product(range(1, count), names):
        module = f"{block}.{expert}.{name}"
        width, rank = outputs // len(names), _pattern(ranks, module, usual)
        tensors[f"{module}.lora_A.weight"] = (
            torch.randn(rank, inputs, generator=seed) * inputs**-0.5
        )
        tensors[f"{module}.lora_B.weight"] = torch.randn(width, rank, generator=seed) * 0.2
    return tensors


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
            _merge(weights, path, scale * up.float(), down.float())
    model.save_pretrained(folder)
    return folder


def _merge(weights: dict[str, Any], path: str, up: torch.Tensor, down: torch.Tensor) -> None:
    """Adds B A to the weight of a module, or to the weights of its experts."""
    block, experts, rest = path.partition(".experts")
    if not experts:
        weights[f"{path}.weight"] += up @ down
        return
    _, number, name = (*rest.split("."), "", "")[:3]
    block += experts
    upper = next(
        f"{block}.{one}_proj" for one in ("gate_up", "up") if f"{block}.{one}_proj" in weights
    )
    if not number.isdigit():
        joined = weights[upper if number else f"{block}.down_proj"]
        count = len(joined)
        downs, ups = down.view(count, -1, down.shape[1]), up.view(len(up), -1, count)
        joined += torch.einsum("ore,eri->eoi", ups, downs)
        return
    whole = weights[f"{block}.down_proj" if name == "down_proj" else upper]
    begin = whole.shape[1] - len(up) if name == "up_proj" else 0
    whole[int(number), begin : begin + len(up)] += up @ down


def _pattern(values: dict[str, Any], path: str, default: Any) -> Any:
    return next((value for end, value in values.items() if path.endswith(end)), default)


def _model(checkpoint: Path) -> Any:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    return load(checkpoint, dtype=torch.float32).eval()
