"""Quantised checkpoints, and the same checkpoints with dequantised weights.

Numbers are packed one by one, following the formats' descriptions. Shares no code with the engine.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace_testing.checkpoints import save_checkpoint

FILE = "model.safetensors"
# Parts of the names of routers, of a shared expert's gate, of the weights of indexers' heads, and
# of the small matrices of recurrent layers.
WHOLE = (
    *(".gate.", ".router.", ".classifier.", ".moe_statics.", ".shared_expert_gate."),
    *(".weights_proj.", ".in_proj_ba.", ".in_proj_a.", ".in_proj_b.", ".A_log"),
    *(".x_proj.", ".dt_proj."),
)
# Granite's experts, which are one tensor.
STACKED = (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.output_linear.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """weight[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g], g the group of input i."""

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    @property
    def weight(self) -> torch.Tensor:
        whole = self.values - self.zeros[:, self.groups]
        return torch.from_numpy((whole * self.scales[:, self.groups]).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Format:
    """A quantisation format. `round` quantises a weight; `pack` returns a module's tensors by their
    suffixes."""

    config: dict[str, Any]
    round: Callable[[torch.Tensor], QuantizedMatrix]
    pack: Callable[[QuantizedMatrix], Tensors]


def save_quantized(
    folder: Path, name: str, form: Format, part: str = ".layers.", **changes: Any
) -> tuple[Path, Path]:
    """Returns the folders of a quantised checkpoint and of the same checkpoint with dequantised
    weights.

    Matrices with a part of `WHOLE` in their names are not quantised, nor those without `part`.
    """
    whole = save_checkpoint(folder / "whole", name, **changes)
    tensors = load_file(whole / FILE)
    packed: Tensors = {}
    for key, weight in tensors.items():
        is_matrix = weight.ndim == 2 or key.endswith(STACKED)
        if not is_matrix or part not in key or any(name in key for name in WHOLE):
            packed[key] = weight
            continue
        module = key.removesuffix("weight")
        if weight.ndim == 3:
            every = [form.round(one) for one in weight]
            tensors[key] = torch.stack([one.weight for one in every])
            packed |= _stacked(module, [form.pack(one) for one in every])
            continue
        rounded = form.round(weight)
        tensors[key] = rounded.weight
        packed |= {module + suffix: tensor for suffix, tensor in form.pack(rounded).items()}
    save_file(tensors, whole / FILE, {"format": "pt"})
    return _save(folder / "packed", whole, packed, form.config), whole


def _stacked(module: str, experts: list[Tensors]) -> Tensors:
    """The tensors of all experts of a mixture, each with one more dimension."""
    return {
        module + suffix: tensor
        if suffix == "weight_shape"
        else torch.stack([expert[suffix] for expert in experts])
        for suffix, tensor in experts[0].items()
    }


def _save(folder: Path, whole: Path, packed: Tensors, quantization: dict[str, Any]) -> Path:
    folder.mkdir()
    config = json.loads((whole / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: part.contiguous() for key, part in packed.items()}, folder / FILE)
    return folder


def rounder(
    bits: int, size: int | None, symmetric: bool, shuffled: bool = False
) -> Callable[[torch.Tensor], QuantizedMatrix]:
    """Rounds to the nearest integer, in groups of `size` inputs (None: one group).

    `shuffled`: inputs are assigned to groups at random, as with desc_act.
    """

    def round_(weight: torch.Tensor) -> QuantizedMatrix:
        values = weight.numpy().astype(np.float64)
        inputs = values.shape[1]
        groups = np.arange(inputs) // (size or inputs)
        if shuffled:
            np.random.default_rng(0).shuffle(groups)
        low = np.stack([values[:, groups == g].min(1) for g in range(groups.max() + 1)], axis=1)
        high = np.stack([values[:, groups == g].max(1) for g in range(groups.max() + 1)], axis=1)
        top = 2**bits - 1
        if symmetric:
            scales = np.maximum(-low, high) / 2 ** (bits - 1)
            zeros = np.full_like(scales, 2 ** (bits - 1))
        else:
            scales = (high - low) / top
            zeros = np.clip(np.round(-low / scales), 0, top)
        scales = scales.astype(np.float16).astype(np.float64)
        rounded = np.clip(np.round(values / scales[:, groups]) + zeros[:, groups], 0, top)
        return QuantizedMatrix(rounded.astype(np.int64), scales, zeros.astype(np.int64), groups)

    return round_


def words(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """[R, C] -> int32 [R, C * bits / 32], the first of each word's numbers in its lowest bits."""
    per_word = 32 // bits
    rows, columns = numbers.shape
    packed = np.zeros((rows, -(-columns // per_word)), dtype=np.uint32)
    for column in range(columns):
        shift = bits * (column % per_word)
        packed[:, column // per_word] |= numbers[:, column].astype(np.uint32) << np.uint32(shift)
    return torch.from_numpy(packed.view(np.int32))


def gptq(
    bits: int = 4,
    size: int | None = 32,
    symmetric: bool = False,
    desc_act: bool = False,
    version: str = "gptq",
) -> Format:
    def pack(found: QuantizedMatrix) -> Tensors:
        less = 1 if version == "gptq" else 0
        return {
            "qweight": words(found.values, bits).T,
            "qzeros": words((found.zeros.T - less) % 2**bits, bits),
            "scales": torch.from_numpy(found.scales.T.astype(np.float16)),
            "g_idx": torch.from_numpy(found.groups.astype(np.int32)),
            "bias": torch.zeros(len(found.values), dtype=torch.float16),
        }

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size or -1,
        "desc_act": desc_act,
        "sym": symmetric,
        "checkpoint_format": version,
    }
    return Format(config, rounder(bits, size, symmetric, desc_act), pack)


def awq(size: int = 32) -> Format:
    def order(numbers: np.ndarray) -> np.ndarray:
        """[R, C]: nibble n of word w holds column 8 w + AWQ_ORDER[n]."""
        by_word = numbers.reshape(len(numbers), -1, 8)
        return by_word[:, :, list(AWQ_ORDER)].reshape(numbers.shape)

    def pack(found: QuantizedMatrix) -> Tensors:
        return {
            "qweight": words(order(found.values.T), 4),
            "qzeros": words(order(found.zeros.T), 4),
            "scales": torch.from_numpy(found.scales.T.astype(np.float16)),
        }

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size,
        "version": "gemm",
        "zero_point": True,
    }
    return Format(config, rounder(4, size, False), pack)


def compressed(bits: int, size: int | None, symmetric: bool = True, packed: bool = True) -> Format:
    """compressed-tensors' pack-quantized or, without `packed`, int-quantized."""
    middle = 2 ** (bits - 1)

    def pack(found: QuantizedMatrix) -> Tensors:
        tensors: Tensors = {
            "weight_scale": torch.from_numpy(found.scales.astype(np.float16)),
            "weight_shape": torch.tensor(found.values.shape),
        }
        if packed:
            tensors["weight_packed"] = words(found.values, bits)
        else:
            tensors["weight"] = torch.from_numpy((found.values - middle).astype(np.int8))
        if not symmetric:
            tensors["weight_zero_point"] = (
                words(found.zeros.T, bits).T
                if packed
                else torch.from_numpy((found.zeros - middle).astype(np.int8))
            )
        return tensors

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if size else "channel",
        "group_size": size,
    }
    return Format(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if packed else "int-quantized",
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
            "ignore": ["lm_head"],
        },
        rounder(bits, size, symmetric),
        pack,
    )


def save_fp8(
    folder: Path, name: str, block: tuple[int, int] | None, compressed_tensors: bool = False
) -> tuple[Path, Path]:
    """Saves like `save_quantized`, in fp8, with a scale for each block or, without blocks, each
    output."""
    whole = save_checkpoint(folder / "whole", name)
    tensors = load_file(whole / FILE)
    packed: Tensors = {}
    for key, weight in tensors.items():
        packed[key] = weight
        if weight.ndim != 2 or ".layers." not in key or any(name in key for name in WHOLE):
            continue
        step = block or (1, weight.shape[1])
        scales = torch.zeros(-(-weight.shape[0] // step[0]), -(-weight.shape[1] // step[1]))
        small, exact = torch.zeros_like(weight).to(torch.float8_e4m3fn), torch.zeros_like(weight)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                area = (
                    slice(row * step[0], (row + 1) * step[0]),
                    slice(column * step[1], (column + 1) * step[1]),
                )
                scale = weight[area].abs().max() / 448.0
                scales[row, column] = scale
                small[area] = (weight[area] / scale).to(torch.float8_e4m3fn)
                exact[area] = small[area].float() * scale
        packed[key], tensors[key] = small, exact
        inverse = block and not compressed_tensors
        packed[f"{key}_scale_inv" if inverse else f"{key}_scale"] = scales
    save_file(tensors, whole / FILE, {"format": "pt"})
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if block:
        config["weight_block_size"] = list(block)
    if compressed_tensors:
        weights = {"num_bits": 8, "type": "float", "symmetric": True}
        weights |= (
            {"strategy": "block", "block_structure": list(block)}
            if block
            else {"strategy": "channel"}
        )
        config = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": weights}},
        }
    return _save(folder / "packed", whole, packed, config), whole


def save_mxfp4(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Saves gpt-oss like `save_quantized`, with experts of random numbers.

    transformers dequantises them.
    """
    whole = save_checkpoint(folder / "whole", "gpt-oss", **changes)
    tensors, generator = load_file(whole / FILE), torch.Generator().manual_seed(1)
    packed: Tensors = dict(tensors)
    for key, weight in tensors.items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = weight.shape
        scales = torch.randint(118, 125, (experts, outputs, inputs // 32), generator=generator)
        blocks = torch.randint(0, 256, (*scales.shape, 16), generator=generator)
        del packed[key]
        packed[f"{key}_blocks"] = blocks.to(torch.uint8)
        packed[f"{key}_scales"] = scales.to(torch.uint8)
        tensors[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, whole / FILE, {"format": "pt"})
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return _save(folder / "packed", whole, packed, config), whole
