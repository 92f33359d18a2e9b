"""An adapter's files: A and B of each module, checked against the model before they are read.

The files stay open and memory-mapped, so an evicted adapter can be loaded again even if its folder
has changed. Pickled adapters are refused: loading one can run code.
"""

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..checkpoints.checkpoint import download
from ..core.errors import CheckpointError
from .adapter_config import CONFIG_FILE, read_adapter_config
from .finder import ModuleFinder
from .modules import Factors, LinearModule
from .shapes import LayerShapes, LinearName

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
DTYPES = ("F32", "F16", "BF16")
PIECE = 2**20
# base_model.model.<path in the model>.lora_A.weight; an adapter's name may come before `weight`.
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")

# By merged layer, then by module; one entry for each decoder layer.
AdapterWeights = Sequence[Mapping[LinearName, Mapping[str, Factors]]]


class AdapterFile:
    """One adapter.

    Each of its tensors has a place in a model of these shapes. Raises CheckpointError or
    ConfigError that name the file, and the tensor or field in it.
    """

    def __init__(self, folder: Path, shapes: Sequence[LayerShapes], max_rank: int) -> None:
        self.folder = folder
        config = read_adapter_config(folder)
        self.path = folder / WEIGHTS_FILE
        self._file = _open(folder)
        self._layers = len(shapes)
        self._modules = ModuleFinder(self, config, shapes, max_rank).modules(self._tensors())

    @property
    def changes_experts(self) -> bool:
        """Whether it has matrices for the experts of mixtures."""
        return any(not isinstance(module, LinearModule) for module in self._modules)

    def load(self, dtype: torch.dtype) -> AdapterWeights:
        """Loads its weights into memory of their own, on the CPU."""
        layers: list[dict[LinearName, dict[str, Factors]]] = [{} for _ in range(self._layers)]
        for module in self._modules:
            factors = module.load(self._read, dtype)
            layers[module.layer].setdefault(module.linear, {})[module.name] = factors
        return layers

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def check(self, name: str, wanted: tuple[int, int]) -> None:
        shape, dtype = self.shape(name), str(self._file.get_slice(name).get_dtype())
        if shape != wanted:
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(shape)}, but the model and {CONFIG_FILE} "
                f"ask for {list(wanted)}"
            )
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {name} has unsupported dtype {dtype}: use {', '.join(DTYPES)}"
            )

    def _tensors(self) -> dict[str, dict[str, str]]:
        """Names of A and B by the paths of modules."""
        found: dict[str, dict[str, str]] = {}
        for name in self._file.keys():
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise CheckpointError(
                    f"{self.path}: {name} is not A or B of a module; only these are served"
                )
            found.setdefault(match[1], {})[match[2]] = name
        if not found:
            raise CheckpointError(f"{self.path} has no tensors: save the adapter again")
        return found

    def _read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error
        return tensor


def fetch_adapter(source: str) -> Path:
    """Fetches an adapter's files from the hub. `source` is an id, or `id@revision`.

    Raises CheckpointError.
    """
    name, _, revision = source.partition("@")
    return download(name, revision or None, (CONFIG_FILE, WEIGHTS_FILE))


def digest_of(folder: Path) -> str:
    """128 bits of a SHA-256 over an adapter's two files, in hexadecimal digits.

    Raises CheckpointError.
    """
    total = sha256()
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            content = sha256()
            with (folder / name).open("rb") as file:
                while piece := file.read(PIECE):
                    content.update(piece)
            total.update(content.digest())
    except OSError as error:
        raise CheckpointError(f"{folder}: its files cannot be read: {error}") from error
    return total.hexdigest()[:32]


def _open(folder: Path) -> Any:
    path = folder / WEIGHTS_FILE
    if not path.is_file() and (folder / PICKLE).is_file():
        raise CheckpointError(
            f"{folder / PICKLE} is a pickle, which can run code when it is loaded; save the "
            "adapter with safetensors (PEFT: model.save_pretrained(folder))"
        )
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: an adapter's folder has its weights in this file"
        ) from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
