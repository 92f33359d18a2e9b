"""Published checkpoints at their true size: config.json, and names and shapes of all tensors.

    PYTHONPATH=tests/support python -m headrace_testing.published_models FOLDER NAME...

writes `tests/test_engine/models/published/NAME.json` from FOLDER/NAME_config.json: the tensors are
those of transformers' model on the meta device, under the names that it stores, and those of the
layer for drafts, which transformers does not have. Nothing is allocated, neither here nor for the
files that `write_checkpoint` makes: they are sparse.
"""

import argparse
import json
import re
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parents[2] / "test_engine" / "models" / "published"
# What safetensors allows in one file is more than some machines map at once.
_FILE_BYTES = 2 * 10**9
_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I32": 4, "I64": 8}
# Published model types that transformers computes as another one.
_SAME_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_RANGES = re.compile(r"\{([\d,-]+)\}")
_MXFP4_BLOCK = 32
# transformers also renames the decoder's layers when it restores the names of Kimi's vision tower.
_KIMI_NAMES = {"language_model.model.blocks.": "language_model.model.layers.", "model.mm_": "mm_"}
# How a layer for drafts names its parts, and the tensors that it has besides those of a layer:
# https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md, and the loaders of other
# engines.
_DEEPSEEK = (
    "model.layers.{}.",
    "model.layers.{}.",
    {
        "enorm": "norm",
        "hnorm": "norm",
        "eh_proj": "projection",
        "embed_tokens": "vocabulary",
        "shared_head.norm": "norm",
        "shared_head.head": "vocabulary",
    },
)
_MIMO = (
    "model.mtp_layers.0.",
    "model.mtp_layers.0.",
    {
        "token_layernorm": "norm",
        "hidden_layernorm": "norm",
        "input_proj": "projection",
        "final_layernorm": "norm",
    },
)
_QWEN = (
    "mtp.layers.0.",
    "mtp.",
    {
        "fc": "projection",
        "norm": "norm",
        "pre_fc_norm_embedding": "norm",
        "pre_fc_norm_hidden": "norm",
    },
)
_DRAFT_NAMES = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"), _DEEPSEEK),
    "mimo": _MIMO,
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
}
_DRAFTS = ("mtp.", "model.mtp_layers.")
_LAYERS = "layers."
_LAYER = re.compile(r"(.*\blayers\.)(\d+)\.")
_TOWERS = ("vision_tower.", "model.visual.")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's dtype, as safetensors names it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


Tensors = Mapping[str, StoredTensor]


def published(name: str, layers: int | None = None) -> tuple[dict[str, Any], Tensors]:
    """The config.json and the tensors of a published checkpoint, such as `Qwen--Qwen3.5-27B`; with
    `layers` only of its first layers, and without those for drafts."""
    data = read_published(name)
    tensors = {
        each: tensor
        for pattern, dtype, shape in data["tensors"]
        if layers is None or not pattern.startswith(_DRAFTS)
        for tensor in [StoredTensor(dtype, tuple(shape))]
        for each in _expand(pattern, layers)
    }
    config = data["config"] if layers is None else _fewer(data["config"], layers)
    return config, tensors


def tensor_count(name: str) -> int:
    """The number of tensors of a published checkpoint."""
    patterns = [pattern for pattern, _, _ in read_published(name)["tensors"]]
    return sum(prod(map(len, _split(pattern, None)[1])) for pattern in patterns)


@cache
def read_published(name: str) -> dict[str, Any]:
    """What is known of a published checkpoint: `config`, and patterns of `tensors`."""
    read: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text())
    return read


def _layer_of(name: str) -> int:
    """The number of a tensor's layer; -1 for one of no layer of the decoder."""
    found = None if name.startswith(_TOWERS) else _LAYER.match(name)
    return -1 if found is None else int(found[2])


def _fewer(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    if "text_config" in config:
        return {**config, "text_config": _fewer(config["text_config"], count)}
    layers = config["num_hidden_layers"]
    found: dict[str, Any] = {
        name: value[:count] if isinstance(value, list) and len(value) == layers else value
        for name, value in config.items()
    }
    return found | {"num_hidden_layers": count, "num_nextn_predict_layers": 0}


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Writes a checkpoint whose files have headers, and holes in place of data."""
    (folder / "config.json").write_text(json.dumps(config))
    places: dict[str, str] = {}
    for number, part in enumerate(_files(tensors)):
        file = f"model-{number:05d}.safetensors"
        _write_holes(folder / file, part)
        places |= dict.fromkeys(part, file)
    index = {"weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _files(tensors: Tensors) -> Iterator[dict[str, StoredTensor]]:
    part: dict[str, StoredTensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + _size(tensor) > _FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += _size(tensor)
    yield part


def _size(tensor: StoredTensor) -> int:
    return prod(tensor.shape) * _BYTES[tensor.dtype]


def _write_holes(file: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + _size(tensor)
        offsets = {"data_offsets": [start, end]}
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, **offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)


def _expand(pattern: str, layers: int | None) -> Iterator[str]:
    """The names of a pattern, without those of layers of the decoder from `layers` on."""
    texts, numbers = _split(pattern, layers)
    template = "%d".join(text.replace("%", "%%") for text in texts)
    return (template % chosen for chosen in product(*numbers))


def _split(pattern: str, layers: int | None) -> tuple[list[str], list[list[int]]]:
    """The texts of a pattern, and the numbers between them."""
    texts = _RANGES.split(pattern)
    numbers = [list(_numbers(text)) for text in texts[1::2]]
    if layers is not None and not pattern.startswith(_TOWERS):
        for text, between in zip(texts[::2], numbers, strict=False):
            if text.endswith(_LAYERS):
                between[:] = [number for number in between if number < layers]
    return texts[::2], numbers


def _numbers(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _patterns(tensors: Tensors) -> list[tuple[str, str, list[int]]]:
    """Patterns that together name all tensors, with their dtypes and shapes."""
    found: dict[tuple[str, StoredTensor], list[tuple[int, ...]]] = defaultdict(list)
    for name, tensor in tensors.items():
        numbers = tuple(map(int, _NUMBER.findall(name)))
        found[_NUMBER.sub("{}", name), tensor].append(numbers)
    rows: list[tuple[str, str, list[int]]] = []
    for (template, tensor), named in found.items():
        columns = [sorted(set(column)) for column in zip(*named, strict=True)]
        if prod(map(len, columns)) != len(named):
            raise ValueError(f"{template}: its numbers are no product of ranges")
        text = template.format(*(f"{{{_ranges(column)}}}" for column in columns))
        rows.append((text, tensor.dtype, list(tensor.shape)))
    return rows


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _by_transformers(config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    left_out = ("auto_map", "quantization_config")
    plain = {name: value for name, value in config.items() if name not in left_out}
    plain["model_type"] = _SAME_AS.get(plain["model_type"], plain["model_type"])
    if config["model_type"] == "mimo":
        plain["use_sliding_window"] = False
    made = AutoConfig.for_model(**plain)
    sees = "vision_config" in plain
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(made, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    tied = model.all_tied_weights_keys
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
    found = {
        name: StoredTensor(names[tensor.dtype], tuple(tensor.shape))
        for name, tensor in revert_weight_conversion(model, own).items()
    }
    if config["model_type"] != "kimi_k25":
        return found
    for usual, stored in _KIMI_NAMES.items():
        found = {name.replace(usual, stored): tensor for name, tensor in found.items()}
    return found


def _quantized(config: Mapping[str, Any], tensors: Tensors) -> dict[str, StoredTensor]:
    """The tensors as the quantisation of config.json stores them."""
    text = config.get("text_config", {})
    kind = config.get("quantization_config", text.get("quantization_config"))
    if kind is None:
        return dict(tensors)
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if kind["quant_method"] == "fp8":
            found |= _fp8(name, tensor, kind)
        elif kind["quant_method"] == "mxfp4":
            found |= _mxfp4(name, tensor)
        elif kind["quant_method"] == "compressed-tensors":
            found |= _packed(name, tensor, kind)
        else:
            raise ValueError(f"quant_method {kind['quant_method']} is not known here")
    return found


def _fp8(name: str, tensor: StoredTensor, kind: Mapping[str, Any]) -> dict[str, StoredTensor]:
    linear = name.endswith("_proj.weight") and len(tensor.shape) == 2
    whole = kind.get("modules_to_not_convert") or kind.get("ignored_layers") or ()
    module = name.removesuffix(".weight")
    if not linear or any(each in module for each in (*whole, "indexer")):
        return {name: tensor}
    blocks = zip(tensor.shape, kind["weight_block_size"], strict=True)
    scales = tuple(-(-size // block) for size, block in blocks)
    return {
        name: StoredTensor("F8_E4M3", tensor.shape),
        f"{name}_scale_inv": StoredTensor("F32", scales),
    }


def _packed(name: str, tensor: StoredTensor, kind: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Integers of a few bits, packed into words of 32, with a scale for each group of inputs."""
    module = name.removesuffix(".weight")
    linear = name.endswith("_proj.weight") and len(tensor.shape) == 2
    patterns = [one.removeprefix("re:") for one in kind["ignore"]]
    if not linear or any(re.match(pattern, module) for pattern in patterns):
        return {name: tensor}
    (group,) = kind["config_groups"].values()
    weights, (outputs, inputs) = group["weights"], tensor.shape
    words = inputs * weights["num_bits"] // 32
    return {
        f"{name}_packed": StoredTensor("I32", (outputs, words)),
        f"{name}_scale": StoredTensor("BF16", (outputs, inputs // weights["group_size"])),
        f"{name}_shape": StoredTensor("I32", (2,)),
    }


def with_drafts(config: Mapping[str, Any], tensors: Tensors) -> dict[str, StoredTensor]:
    """The tensors, and those of the published layer for drafts: its own ones, and the parts of the
    decoder's last layer."""
    kind = config["model_type"]
    if kind not in _DRAFT_NAMES:
        return dict(tensors)
    last = max(map(_layer_of, tensors))
    layer, prefix, names = _DRAFT_NAMES[kind]
    hidden = config.get("text_config", config)["hidden_size"]
    shapes = {"norm": (hidden,), "projection": (hidden, 2 * hidden)}
    shapes["vocabulary"] = tensors["lm_head.weight"].shape
    found = dict(tensors)
    for name, shape in names.items():
        found[f"{prefix.format(last + 1)}{name}.weight"] = StoredTensor("BF16", shapes[shape])
    for name, tensor in tensors.items():
        if _layer_of(name) == last:
            part = name.partition(f"layers.{last}.")[2]
            found[layer.format(last + 1) + part] = tensor
    return found


def _mxfp4(name: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
    if not name.endswith((".gate_up_proj", ".down_proj")):
        return {name: tensor}
    experts, inputs, outputs = tensor.shape
    shape = (experts, outputs, inputs // _MXFP4_BLOCK)
    return {
        f"{name}_blocks": StoredTensor("U8", (*shape, _MXFP4_BLOCK // 2)),
        f"{name}_scales": StoredTensor("U8", shape),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    for name in options.names:
        config = json.loads((options.folder / f"{name}_config.json").read_text())
        tensors = with_drafts(config, _quantized(config, _by_transformers(config)))
        rows = sorted(_patterns(tensors))
        lines = ",\n".join(json.dumps(row) for row in rows)
        text = f'{{"config": {json.dumps(config)},\n"tensors": [\n{lines}\n]}}\n'
        (PUBLISHED / f"{name}.json").write_text(text)
        sys.stdout.write(f"{name}: {len(tensors)} tensors, {len(rows)} patterns\n")


if __name__ == "__main__":
    main()
