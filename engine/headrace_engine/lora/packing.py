"""An adapter's matrices as one tensor for each decoder layer, for the broadcast from rank 0.

The model's shapes and the matrices' ranks define the tensor's layout. The ranks are sent first, as
integers: 0 for a module that the adapter lacks.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch

from .adapter import AdapterWeights
from .modules import Factors
from .shapes import Columns, LayerShapes, LinearName

LayerWeights = Mapping[LinearName, Mapping[str, Factors]]
# Shapes [rank, in] and [rank, out] of a module; those of experts begin with their number.
_Pair = tuple[tuple[int, ...], tuple[int, ...]]


def ranks_of(shapes: Sequence[LayerShapes], weights: AdapterWeights) -> list[int]:
    """The ranks of all modules of all layers."""
    found: list[int] = []
    for layer, own in zip(shapes, weights, strict=True):
        for linear, name, _ in _modules(layer):
            factors = own.get(linear, {}).get(name)
            found.append(0 if factors is None else factors.down.shape[-2])
    return found


def by_layer(
    shapes: Sequence[LayerShapes], ranks: Sequence[int]
) -> Iterator[tuple[LayerShapes, Sequence[int]]]:
    """Each layer with its modules' ranks."""
    begin = 0
    for layer in shapes:
        end = begin + sum(1 for _ in _modules(layer))
        yield layer, ranks[begin:end]
        begin = end


def packed_length(layer: LayerShapes, ranks: Sequence[int]) -> int:
    return sum(prod(down) + prod(up) for _, _, (down, up) in _present(layer, ranks))


def pack(layer: LayerShapes, ranks: Sequence[int], weights: LayerWeights) -> torch.Tensor:
    """Packs a layer into [packed_length], on the host."""
    factors = [weights[linear][name] for linear, name, _ in _present(layer, ranks)]
    return torch.cat([part.reshape(-1) for each in factors for part in (each.down, each.up)])


def unpack(layer: LayerShapes, ranks: Sequence[int], packed: torch.Tensor) -> LayerWeights:
    """The matrices that `pack` wrote, as views."""
    found: dict[LinearName, dict[str, Factors]] = {}
    begin = 0
    for linear, name, pair in _present(layer, ranks):
        parts = []
        for shape in pair:
            end = begin + prod(shape)
            parts.append(packed[begin:end].view(shape))
            begin = end
        found.setdefault(linear, {})[name] = Factors(*parts)
    return found


def _present(layer: LayerShapes, ranks: Sequence[int]) -> Iterator[tuple[LinearName, str, _Pair]]:
    """The modules that an adapter has, with the shapes of their matrices."""
    for (linear, name, columns), rank in zip(_modules(layer), ranks, strict=True):
        shape = layer[linear]
        room = (shape.experts, rank) if shape.experts else (rank,)
        if rank:
            yield linear, name, ((*room, shape.local.total), (*room, columns.local.total))


def _modules(layer: LayerShapes) -> Iterator[tuple[LinearName, str, Columns]]:
    for linear, shape in layer.items():
        for name, columns in shape.parts.items():
            yield linear, name, columns
