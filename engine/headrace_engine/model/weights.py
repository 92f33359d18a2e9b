"""Weights out of safetensors files, memory-mapped and read tensor by tensor.

Headers are checked against what the model expects before anything is read, so that a wrong
checkpoint fails at once, by file and tensor. Pickled weights are refused: loading one can run code.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .checkpoint import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_NAMED = 5

Shape = tuple[int, ...]
_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    file: Path
    shape: Shape
    dtype: str


class WeightReader:
    """Reads tensors as `dtype` onto `device`. Raises CheckpointError for whatever is wrong."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._tensors = scan(folder)

    def check(self, expected: Mapping[str, Shape], ignored: Collection[str] = ()) -> None:
        """Holds the files' headers against the expected names and shapes.

        `ignored` names tensors that may be there and are not read.
        """
        missing = [name for name in expected if name not in self._tensors]
        if missing:
            raise CheckpointError(f"{self._folder}: missing tensors: {_some(missing)}")
        for name, shape in expected.items():
            found = self._tensors[name]
            if found.shape != shape:
                raise CheckpointError(
                    f"{found.file}: {name} has shape {list(found.shape)}, but config.json asks "
                    f"for {list(shape)}"
                )
            if found.dtype not in _FLOATS:
                raise CheckpointError(f"{found.file}: {name} has unsupported dtype {found.dtype}")
        self._check_unexpected(expected, ignored)

    def _check_unexpected(self, expected: Mapping[str, Shape], ignored: Collection[str]) -> None:
        extra = [
            name
            for name in self._tensors
            if name not in expected and name not in ignored and not name.endswith(".inv_freq")
        ]
        if extra:
            file = self._tensors[extra[0]].file
            raise CheckpointError(
                f"{file}: tensors that the model has no place for: {_some(extra)}"
            )

    def read(self, name: str) -> torch.Tensor:
        return self.stack((name,))

    def view(self, name: str) -> torch.Tensor:
        """A tensor for reading only: pages of the mapped file where nothing is to be converted."""
        return self._open(name).to(device=self._device, dtype=self._dtype).contiguous()

    def stack(self, names: Iterable[str]) -> torch.Tensor:
        """The named tensors below each other (dimension 0), in memory of their own."""
        parts = [self._open(name) for name in names]
        rows = sum(part.shape[0] for part in parts)
        out = torch.empty((rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        start = 0
        for part in parts:
            out[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
        return out

    def _open(self, name: str) -> torch.Tensor:
        info = self._tensors[name]
        try:
            with _open(info.file) as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{info.file}: {name} cannot be read: {error}") from error
        return tensor


def scan(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint by name, from the headers of its safetensors files."""
    found: dict[str, TensorInfo] = {}
    for file in _files(folder):
        for name, info in _header(file).items():
            if name in found:
                raise CheckpointError(f"{file}: {name} is also in {found[name].file}")
            found[name] = info
    return found


def stored_dtype(folder: Path) -> torch.dtype:
    """The float dtype that most of a checkpoint's tensors are stored in."""
    names = [info.dtype for info in scan(folder).values() if info.dtype in _FLOATS]
    if not names:
        raise CheckpointError(f"{folder}: the safetensors files hold no float tensors")
    return _FLOATS[max(sorted(set(names)), key=names.count)]


def _header(file: Path) -> dict[str, TensorInfo]:
    try:
        with _open(file) as opened:
            return {name: _info(file, opened.get_slice(name)) for name in opened.keys()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error


def _open(file: Path) -> Any:
    return safe_open(file, framework="pt")


def _info(file: Path, header: Any) -> TensorInfo:
    return TensorInfo(file, tuple(header.get_shape()), str(header.get_dtype()))


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed(index)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    pickles = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    )
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]} is a pickle, which can run code when it is loaded; save the "
            "model with safetensors (transformers: model.save_pretrained(folder))"
        )
    raise CheckpointError(f"{folder / SINGLE_FILE} is missing")


def _indexed(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be an object that names files")
    names = set(weight_map.values())
    for name in names:
        plain = isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name
        if not plain:
            raise CheckpointError(
                f"{index}: weight_map names {name!r:.80}; only safetensors files beside the index "
                "are allowed"
            )
    return [index.parent / name for name in sorted(names)]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"
