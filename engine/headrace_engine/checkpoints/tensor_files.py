"""The tensors of a checkpoint's safetensors files, memory-mapped, by their stored names.

Headers are read and checked first; a tensor's bytes are read when it is loaded. Pickled weights are
refused: loading one can run code.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..core.errors import CheckpointError
from .checkpoint import read_json
from .loading import FileRange, LoadProgress, ReadAhead, data_ranges

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor's file, shape and dtype."""

    file: Path
    shape: Shape
    dtype: str


class TensorFiles:
    """A checkpoint's stored tensors. Raises CheckpointError for files that are missing or
    broken."""

    def __init__(self, folder: Path, progress: LoadProgress | None = None) -> None:
        self.folder = folder
        self.tensors = scan(folder)
        self._progress = progress
        self._ahead: ReadAhead | None = None
        self._ranges: dict[str, FileRange] = {}
        self._left: set[str] = set()
        self._opened = cache(_open)

    def plan(self, names: Iterable[str]) -> None:
        """Begins to read ahead these tensors, which will be loaded roughly in this order."""
        wanted = list(dict.fromkeys(names))
        for file in {self.tensors[name].file for name in wanted}:
            self._ranges |= data_ranges(file)
        ranges = [self._ranges[name] for name in wanted]
        self._left = set(wanted)
        if self._progress is not None:
            self._progress.begin(sum(one.stop - one.start for one in ranges))
        self._ahead = ReadAhead(ranges)

    def load(self, name: str) -> torch.Tensor:
        """Loads a stored tensor as a view of the mapped file."""
        info = self.tensors[name]
        try:
            tensor: torch.Tensor = self._opened(info.file).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{info.file}: {name} cannot be read: {error}") from error
        self._count(name)
        return tensor

    def _count(self, name: str) -> None:
        """Counts progress once for each tensor: each of its parts may load it again."""
        if name not in self._left:
            return
        self._left.remove(name)
        length = self._ranges[name].stop - self._ranges[name].start
        if self._progress is not None:
            self._progress.advance(length)
        if self._ahead is not None:
            self._ahead.advance(length)


def scan(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint by name, from the headers of its safetensors files."""
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
        opened = _open(file)
        return {name: _info(file, opened.get_slice(name)) for name in opened.keys()}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} is missing, but {INDEX_FILE} names it: copy all files of the checkpoint"
        ) from error
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
