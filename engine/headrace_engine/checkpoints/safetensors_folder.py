"""A folder's safetensors files, memory-mapped. Pickled weights are refused: loading one can run
code."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..core.errors import CheckpointError
from .checkpoint import read_json
from .loading import FileRange, data_ranges, read_header
from .tensor_info import TensorInfo

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class SafetensorsFolder:
    """The tensors of all files by name, read from their headers unless they are given. Raises
    CheckpointError for files that are missing or broken."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo] | None = None) -> None:
        self.tensors = _scan(folder) if tensors is None else tensors
        self._opened = cache(_open)

    def ranges(self, names: Iterable[str]) -> Mapping[str, FileRange]:
        """The place of each of these tensors."""
        wanted = set(names)
        files = {self.tensors[name].file for name in wanted}
        found = [data_ranges(file) for file in files]
        return {name: one[name] for one in found for name in one.keys() & wanted}

    def load(self, name: str) -> torch.Tensor:
        """A view of the mapped file."""
        info = self.tensors[name]
        try:
            tensor: torch.Tensor = self._opened(info.file).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{info.file}: {name} cannot be read: {error}") from error
        return tensor


def _scan(folder: Path) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for file in _files(folder):
        for name, info in _header(file).items():
            if name in found:
                raise CheckpointError(
                    f"{file}: {name} is also in {found[name].file}: remove one of the files"
                )
            found[name] = info
    return found


def _header(file: Path) -> dict[str, TensorInfo]:
    try:
        _open(file)  # checks the header
        header, _ = read_header(file)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} is missing, but {INDEX_FILE} names it: copy all files of the checkpoint"
        ) from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error
    return {
        name: TensorInfo(file, tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
    }


def _open(file: Path) -> Any:
    return safe_open(file, framework="pt")


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
    raise CheckpointError(
        f"{folder / SINGLE_FILE} is missing: a checkpoint needs its weights as safetensors"
    )


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
