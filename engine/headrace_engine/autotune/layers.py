"""What measurements of linear layers have in common: the choice of layers, and names for the
log."""

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from ..kernels.triton.launch import SmallBatchLaunch, VectorLaunch
from .autotuner import Run

# A measurement reads at least this number of bytes, if the layers have them: several times the
# last-level cache.
ROTATED_BYTES = 256 << 20


class HasWeightBytes(Protocol):
    @property
    def weight_bytes(self) -> int: ...


Layer = TypeVar("Layer", bound=HasWeightBytes)
Arguments = ParamSpec("Arguments")


def enough_layers(layers: Sequence[Layer]) -> list[Layer]:
    """Returns enough layers that none is still in the cache when it is computed again."""
    return list(layers[: -(-ROTATED_BYTES // layers[0].weight_bytes)])


def read_bytes(layers: Sequence[HasWeightBytes]) -> int:
    return sum(layer.weight_bytes for layer in layers)


def run_all(
    layers: Sequence[Layer],
    compute: Callable[Concatenate[Layer, Arguments], torch.Tensor],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Run:
    """Returns a run that computes all layers and returns the first one's result."""
    return lambda: [compute(layer, *args, **kwargs) for layer in layers][0]


def tile_name(launch: SmallBatchLaunch) -> str:
    return f"{launch.columns}x{launch.depth}, {parts_name(launch)}"


def vector_name(launch: VectorLaunch) -> str:
    return f"vector {launch.columns}x{launch.depth}, warps {launch.warps}"


def parts_name(launch: SmallBatchLaunch) -> str:
    """A name for launches of kernels whose depth follows from the weights' layout."""
    return f"parts {launch.splits}, warps {launch.warps}, stages {launch.stages}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
