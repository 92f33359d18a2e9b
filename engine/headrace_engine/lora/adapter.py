"""An adapter's files: A and B of each module, checked against the model before anything is read.

The files stay open and memory-mapped, so that an adapter that gave way can be loaded again whatever
became of its folder. Pickled adapters are refused: loading one can run code.
"""

import re
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, ConfigError
from .adapter_config import CONFIG_FILE, AdapterConfig, read_adapter_config
from .shapes import LayerShapes, LinearName

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
DTYPES = ("F32", "F16", "BF16")
# base_model.model.<path in the model>.lora_A.weight; an adapter's name may stand before `weight`.
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_MODULE = re.compile(
    r"(?:model|language_model\.model|model\.language_model)\.layers\.(\d+)\.(\w+\.\w+)"
)


@dataclass(frozen=True, slots=True)
class Factors:
    """`down` is A [rank, in], `up` is B transposed [rank, out] with the scale in it."""

    down: torch.Tensor
    up: torch.Tensor


# By merged layer and, in it, by module; one entry a decoder layer.
AdapterWeights = Rows[Mapping[LinearName, Mapping[str, Factors]]]


@dataclass(frozen=True, slots=True)
class _Module:
    """Where a module's tensors are in the file, and the number that multiplies their product."""

    layer: int
    linear: LinearName
    name: str
    down: str
    up: str
    scale: float


class AdapterFile:
    """One adapter, of which every tensor has its place in a model of these shapes.

    Raises CheckpointError or ConfigError that name the file, and the tensor or field in it.
    """

    def __init__(self, folder: Path, shapes: Rows[LayerShapes], max_rank: int) -> None:
        self.folder = folder
        config = read_adapter_config(folder)
        self._file = _open(folder)
        self._path = folder / WEIGHTS_FILE
        self._layers = len(shapes)
        self._modules = self._check(config, shapes, max_rank)

    def load(self, dtype: torch.dtype) -> AdapterWeights:
        """Its weights in memory of their own, on the CPU."""
        layers: list[dict[LinearName, dict[str, Factors]]] = [{} for _ in range(self._layers)]
        for module in self._modules:
            down, up = self._read(module.down), self._read(module.up)
            factors = Factors(
                down.to(dtype, copy=True), (up.float() * module.scale).T.contiguous().to(dtype)
            )
            layers[module.layer].setdefault(module.linear, {})[module.name] = factors
        return layers

    def _read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read: {error}") from error
        return tensor

    def _check(
        self, config: AdapterConfig, shapes: Rows[LayerShapes], max_rank: int
    ) -> tuple[_Module, ...]:
        pairs: dict[str, dict[str, str]] = {}
        for name in self._file.keys():
            found = _TENSOR.fullmatch(name)
            if found is None:
                raise CheckpointError(
                    f"{self._path}: {name} is not A or B of a module; only these are served"
                )
            pairs.setdefault(found[1], {})[found[2]] = name
        if not pairs:
            raise CheckpointError(f"{self._path} has no tensors")
        return tuple(
            self._module(path, pair, config, shapes, max_rank) for path, pair in pairs.items()
        )

    def _module(
        self,
        path: str,
        pair: Mapping[str, str],
        config: AdapterConfig,
        shapes: Rows[LayerShapes],
        max_rank: int,
    ) -> _Module:
        layer, linear, name = self._locate(path, shapes)
        if len(pair) < 2:
            raise CheckpointError(f"{self._path}: {next(iter(pair.values()))} has no counterpart")
        rank = config.rank_of(path)
        if rank > max_rank:
            raise ConfigError(
                f"{config.path}: rank {rank} of {path} is over max_lora_rank {max_rank}: raise that"
            )
        shape = shapes[layer][linear]
        self._check_tensor(pair["A"], (rank, shape.inputs))
        self._check_tensor(pair["B"], (shape.parts[name].width, rank))
        return _Module(layer, linear, name, pair["A"], pair["B"], config.scale_of(path))

    def _locate(self, path: str, shapes: Rows[LayerShapes]) -> tuple[int, LinearName, str]:
        found = _MODULE.fullmatch(path)
        served = {name for layer in shapes for linear in layer.values() for name in linear.parts}
        if found is None or found[2] not in served:
            names = ", ".join(sorted(name.rpartition(".")[2] for name in served))
            raise CheckpointError(
                f"{self._path}: adapters of {path} cannot be served; of this model's modules these "
                f"can: {names}"
            )
        layer = int(found[1])
        if layer >= len(shapes):
            raise CheckpointError(
                f"{self._path}: {path} is of layer {layer}, but the model has {len(shapes)} layers"
            )
        for linear, shape in shapes[layer].items():
            if found[2] in shape.parts:
                return layer, linear, found[2]
        raise CheckpointError(f"{self._path}: layer {layer} of the model has no {found[2]}")

    def _check_tensor(self, name: str, wanted: tuple[int, int]) -> None:
        header = self._file.get_slice(name)
        shape, dtype = tuple(header.get_shape()), str(header.get_dtype())
        if shape != wanted:
            raise CheckpointError(
                f"{self._path}: {name} has shape {list(shape)}, but the model and {CONFIG_FILE} "
                f"ask for {list(wanted)}"
            )
        if dtype not in DTYPES:
            raise CheckpointError(f"{self._path}: {name} has unsupported dtype {dtype}")


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
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
