"""Published checkpoints at their true size: config.json, and names and shapes of all tensors.

    PYTHONPATH=tests/support python -m headrace_testing.published_models FOLDER NAME...

writes `tests/test_engine/models/published/NAME.json` from FOLDER/NAME_config.json: the tensors are
those of transformers' model on the meta device, under the names that it stores. Nothing is
allocated, neither here nor for the files that `write_checkpoint` makes: they are sparse.
"""

import argparse
import json
import re
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's dtype, as safetensors names it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


Tensors = Mapping[str, StoredTensor]


def published(name: str) -> tuple[dict[str, Any], Tensors]:
    """The config.json and the tensors of a published checkpoint, such as `Qwen--Qwen3.5-27B`."""
    data = json.loads((PUBLISHED / f"{name}.json").read_text())
    tensors = {
        each: StoredTensor(dtype, tuple(shape))
        for pattern, dtype, shape in data["tensors"]
        for each in _expand(pattern)
    }
    return data["config"], tensors


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


def _expand(pattern: str) -> Iterator[str]:
    texts = _RANGES.split(pattern)
    numbers = [list(_numbers(text)) for text in texts[1::2]]
    for chosen in product(*numbers):
        joined = zip((*chosen, ""), texts[::2], strict=True)
        yield "".join(f"{text}{number}" for number, text in joined)


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
    return {
        name: StoredTensor(names[tensor.dtype], tuple(tensor.shape))
        for name, tensor in revert_weight_conversion(model, own).items()
    }


def _quantized(config: Mapping[str, Any], tensors: Tensors) -> dict[str, StoredTensor]:
    """The tensors as the quantisation of config.json stores them."""
    kind = config.get("quantization_config")
    if kind is None:
        return dict(tensors)
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if kind["quant_method"] == "fp8":
            found |= _fp8(name, tensor, kind)
        elif kind["quant_method"] == "mxfp4":
            found |= _mxfp4(name, tensor)
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
        tensors = _quantized(config, _by_transformers(config))
        rows = sorted(_patterns(tensors))
        lines = ",\n".join(json.dumps(row) for row in rows)
        text = f'{{"config": {json.dumps(config)},\n"tensors": [\n{lines}\n]}}\n'
        (PUBLISHED / f"{name}.json").write_text(text)
        sys.stdout.write(f"{name}: {len(tensors)} tensors, {len(rows)} patterns\n")


if __name__ == "__main__":
    main()
