"""Finds the place of each tensor of an adapter in a model, and refuses tensors without one.

Raises CheckpointError and ConfigError that name the file, and the tensor or field in it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..core.errors import CheckpointError, ConfigError
from .adapter_config import AdapterConfig
from .modules import (
    FusedExpertsModule,
    LinearModule,
    LoRAPair,
    Module,
    ModulePath,
    PerExpertModules,
    parse,
)
from .shapes import LayerShapes, LinearName, LinearShape

# For each merged layer of an expert: its matrices, in the order of its outputs. Experts without a
# gate have only the last one.
_EXPERT_MATRICES: Mapping[LinearName, tuple[str, ...]] = {
    "experts_gate_up": ("gate_proj", "up_proj"),
    "experts_down": ("down_proj",),
}
# Names of a module's A and B in a file.
Names = Mapping[str, str]


class TensorHeaders(Protocol):
    """The headers of an adapter's tensors."""

    path: Path

    def shape(self, name: str) -> tuple[int, ...]: ...

    def check(self, name: str, wanted: tuple[int, int]) -> None:
        """Raises CheckpointError for a tensor of another shape, or a dtype that is not served."""


class ModuleFinder:
    """Matches an adapter's tensors with the modules of a model."""

    def __init__(
        self,
        headers: TensorHeaders,
        config: AdapterConfig,
        shapes: Sequence[LayerShapes],
        max_rank: int,
    ) -> None:
        self._headers, self._config = headers, config
        self._shapes, self._max_rank = shapes, max_rank

    def modules(self, tensors: Mapping[str, Names]) -> tuple[Module, ...]:
        """Returns the modules of an adapter; `tensors` maps the path of each to its tensors'
        names."""
        found: list[Module] = []
        experts: dict[tuple[int, LinearName], list[tuple[int, int, LoRAPair]]] = {}
        for path, names in tensors.items():
            place = self._place(path)
            if len(names) < 2:
                (alone,) = names.values()
                raise CheckpointError(
                    f"{self._headers.path}: {alone} has no counterpart: a module needs A and B, so "
                    "save the adapter again"
                )
            if place.expert >= 0:
                linear, part = _expert_matrices(self._shapes[place.layer])[place.name]
                pair = self._expert_pair(path, linear, place, names)
                experts.setdefault((place.layer, linear), []).append((place.expert, part, pair))
            elif place.is_fused_experts:
                found.append(self._fused_experts(path, place, names))
            else:
                found.append(self._linear(path, place, names))
        found += [self._per_expert(layer, linear, own) for (layer, linear), own in experts.items()]
        self._check_duplicates(found)
        return tuple(found)

    def _place(self, path: str) -> ModulePath:
        place = parse(path)
        layers = len(self._shapes)
        if place is None or not self._is_served(place, self._shapes):
            raise CheckpointError(
                f"{self._headers.path}: adapters of {path} cannot be served; of this model's "
                f"modules these can: {_served(self._shapes)}"
            )
        if place.layer >= layers:
            raise CheckpointError(
                f"{self._headers.path}: {path} is of layer {place.layer}, but the model has "
                f"{layers} layers"
            )
        if not self._is_served(place, [self._shapes[place.layer]]):
            raise CheckpointError(
                f"{self._headers.path}: layer {place.layer} of the model has no {place.written}"
            )
        return place

    def _is_served(self, place: ModulePath, layers: Sequence[LayerShapes]) -> bool:
        if place.expert >= 0:
            return any(
                place.name in _expert_matrices(layer)
                and place.expert < layer["experts_down"].experts
                for layer in layers
            )
        if place.is_fused_experts:
            return any("experts_down" in layer for layer in layers)
        return any(
            place.name in shape.parts
            for layer in layers
            for shape in layer.values()
            if not shape.experts
        )

    def _linear(self, path: str, place: ModulePath, names: Names) -> LinearModule:
        for linear, shape in self._shapes[place.layer].items():
            if place.name in shape.parts:
                rank = self._rank(path, self._max_rank)
                width = shape.parts[place.name].local.total
                pair = self._pair(path, names, rank, (shape.local.total, width))
                return LinearModule(place.layer, linear, place.name, pair)
        raise AssertionError("a module that is served is in one of the layers")

    def _expert_pair(
        self, path: str, linear: LinearName, place: ModulePath, names: Names
    ) -> LoRAPair:
        shape = self._shapes[place.layer][linear]
        inputs, outputs = _totals(shape)
        rank = self._rank(path, self._max_rank)
        return self._pair(path, names, rank, (inputs, outputs // shape.matrices))

    def _fused_experts(self, path: str, place: ModulePath, names: Names) -> FusedExpertsModule:
        layer = self._shapes[place.layer]
        sizes = self._headers.shape(names["A"])[-1], self._headers.shape(names["B"])[0]
        linear = self._fused_parameter(path, layer, sizes)
        shape = layer[linear]
        (name,) = shape.parts
        own, wanted = f"{path.partition('.mlp.')[0]}.{name}", _totals(shape)
        transposed = sizes == wanted[::-1] and (sizes != wanted or self._config.transposed_experts)
        rank = self._rank(own, shape.matrices * self._max_rank)
        pair = self._pair(own, names, rank, sizes if transposed else wanted, shape.experts)
        return FusedExpertsModule(place.layer, linear, name, pair, shape.experts, transposed)

    def _fused_parameter(self, path: str, layer: LayerShapes, sizes: tuple[int, int]) -> LinearName:
        """Chooses between the experts' two parameters by the sizes of A and B. Without gates one
        has the transposed sizes of the other."""
        down = _totals(layer["experts_down"])
        if layer["experts_gate_up"].matrices > 1:
            return "experts_down" if sizes in (down, down[::-1]) else "experts_gate_up"
        if down[0] == down[1]:
            raise CheckpointError(
                f"{self._headers.path}: {path} may be of up_proj or of down_proj, which have the "
                "same sizes: save an adapter with a module for each expert"
            )
        stored = sizes[::-1] if self._config.transposed_experts else sizes
        return "experts_down" if stored == down else "experts_gate_up"

    def _per_expert(
        self, layer: int, linear: LinearName, pairs: Sequence[tuple[int, int, LoRAPair]]
    ) -> PerExpertModules:
        shape = self._shapes[layer][linear]
        (name,) = shape.parts
        ranks = [
            max((pair.rank for _, part, pair in pairs if part == number), default=0)
            for number in range(shape.matrices)
        ]
        return PerExpertModules(layer, linear, name, pairs, ranks, shape.experts, *_totals(shape))

    def _check_duplicates(self, modules: Sequence[Module]) -> None:
        """Refuses a module whose matrices are stored in two ways."""
        seen: set[tuple[int, str]] = set()
        for module in modules:
            key = (module.layer, module.name)
            if key in seen:
                raise CheckpointError(
                    f"{self._headers.path}: {module.name} of layer {module.layer} is stored "
                    "twice: for each expert, and for all experts together"
                )
            seen.add(key)

    def _rank(self, path: str, most: int) -> int:
        rank = self._config.rank_of(path)
        if rank > most:
            raise ConfigError(
                f"{self._config.path}: rank {rank} of {path} is over max_lora_rank "
                f"{self._max_rank}: raise max_lora_rank"
            )
        return rank

    def _pair(
        self, path: str, names: Names, rank: int, sizes: tuple[int, int], experts: int = 1
    ) -> LoRAPair:
        inputs, outputs = sizes
        self._headers.check(names["A"], (rank * experts, inputs))
        self._headers.check(names["B"], (outputs, rank * experts))
        return LoRAPair(names["A"], names["B"], rank, self._config.scale_of(path))


def _expert_matrices(layer: LayerShapes) -> dict[str, tuple[LinearName, int]]:
    """For each matrix of an expert: the merged layer that contains it, and its index among those
    side by side in the layer's outputs."""
    return {
        matrix: (linear, index)
        for linear, names in _EXPERT_MATRICES.items()
        if linear in layer
        for index, matrix in enumerate(names[-layer[linear].matrices :])
    }


def _totals(shape: LinearShape) -> tuple[int, int]:
    """The numbers of inputs and outputs, over all ranks, of a layer with one module."""
    (columns,) = shape.parts.values()
    return shape.local.total, columns.local.total


def _served(shapes: Sequence[LayerShapes]) -> str:
    names = {name for layer in shapes for shape in layer.values() for name in shape.parts}
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))
