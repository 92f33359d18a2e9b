"""What measurements of linear layers have in common: which of them, and what is told of them."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from ..triton_kernels.launch import SkinnyLaunch
from .autotuner import Run

# Bytes that one measurement reads at least, where there are so many: several times the last cache.
ROTATED_BYTES = 256 << 20


class Weighted(Protocol):
    @property
    def weight_bytes(self) -> int: ...


Layer = TypeVar("Layer", bound=Weighted)
Arguments = ParamSpec("Arguments")


def rotated(layers: Rows[Layer]) -> list[Layer]:
    """So many that none is in a cache when its turn comes again."""
    return list(layers[: -(-ROTATED_BYTES // layers[0].weight_bytes)])


def read_bytes(layers: Rows[Weighted]) -> int:
    return sum(layer.weight_bytes for layer in layers)


def over(
    layers: Rows[Layer],
    compute: Callable[Concatenate[Layer, Arguments], torch.Tensor],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Run:
    """Computes all layers, and gives what the first one did."""
    return lambda: [compute(layer, *args, **kwargs) for layer in layers][0]


def tile_name(launch: SkinnyLaunch) -> str:
    return f"{launch.columns}x{launch.depth}, {parts_name(launch)}"


def parts_name(launch: SkinnyLaunch) -> str:
    """Of kernels whose inputs are taken as the weights lie."""
    return f"parts {launch.splits}, warps {launch.warps}, stages {launch.stages}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
