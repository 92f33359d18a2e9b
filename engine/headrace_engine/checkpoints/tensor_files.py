"""The stored tensors of a checkpoint by their published names: of safetensors or of a GGUF file.

Headers are read and checked first; a tensor's bytes are read when it is loaded.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from headrace_common.text.gguf.files import is_gguf

from .gguf_tensors import GGUFTensors
from .loading import WHOLE, FileRange, LoadProgress, Portion, ReadAhead
from .safetensors_folder import INDEX_FILE, SINGLE_FILE, SafetensorsFolder
from .tensor_info import Shape, TensorInfo

__all__ = [
    "INDEX_FILE", "SINGLE_FILE", "WHOLE", "Portion", "Shape", "TensorFiles", "TensorHeaders",
    "TensorInfo", "has_files", "scan",
]  # fmt: skip

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class TensorStore(Protocol):
    """Files of one format."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def ranges(self, names: Iterable[str]) -> Mapping[str, FileRange]:
        """The place of each of these tensors."""

    def load(self, name: str) -> torch.Tensor:
        """A tensor, as a view of the mapped file where that is possible. One that is quantised in a
        GGUF file is given as uint8 [rows, bytes of a row]."""


class TensorFiles:
    """A checkpoint's stored tensors. `folder` is the folder, or the GGUF file; `tensors` is what
    `scan` found there, if it was called before.

    Raises CheckpointError for files that are missing or broken.
    """

    def __init__(
        self,
        folder: Path,
        progress: LoadProgress | None = None,
        tensors: Mapping[str, TensorInfo] | None = None,
    ) -> None:
        self.folder = folder
        self._store = _open(folder, tensors)
        self.tensors = self._store.tensors
        self._progress = progress
        self._ahead: ReadAhead | None = None
        self._ranges: dict[str, FileRange] = {}
        self._left: set[str] = set()

    def plan(self, portions: Mapping[str, Portion]) -> None:
        """Begins to read ahead these portions of tensors, which will be loaded roughly in this
        order."""
        places = self._store.ranges(portions)
        ranges = [places[name].of(portion) for name, portion in portions.items()]
        self._ranges |= zip(portions, ranges, strict=True)
        self._left = set(portions)
        if self._progress is not None:
            self._progress.begin(sum(one.stop - one.start for one in ranges))
        self._ahead = ReadAhead(ranges)

    def load(self, name: str) -> torch.Tensor:
        """Loads a stored tensor as a view of the mapped file where that is possible."""
        tensor = self._store.load(name)
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


class TensorHeaders(TensorFiles):
    """A checkpoint's headers: tensors are loaded onto the meta device, without their bytes."""

    def load(self, name: str) -> torch.Tensor:
        info = self.tensors[name]
        return torch.empty(info.shape, dtype=_DTYPES[info.dtype], device="meta")


def has_files(folder: Path) -> bool:
    """Whether a folder has files of tensors, or names such files."""
    return (folder / INDEX_FILE).is_file() or any(folder.glob("*.safetensors"))


def scan(folder: Path) -> Mapping[str, TensorInfo]:
    """Every tensor of a checkpoint by name, from the headers of its files."""
    return _open(folder).tensors


def _open(folder: Path, tensors: Mapping[str, TensorInfo] | None = None) -> TensorStore:
    return GGUFTensors(folder) if is_gguf(folder) else SafetensorsFolder(folder, tensors)
