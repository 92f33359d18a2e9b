"""Measures products of few rows with weights in whole numbers: tiles and parts."""

from collections.abc import Sequence as Rows
from functools import partial

import torch

from ..model.levels_linear import LevelsLinear, LevelsProducts, LevelsShape
from ..triton_kernels.launch import ROW_BOUNDS, SkinnyLaunch
from ..triton_kernels.levels_launch import levels_candidates
from .autotuner import Autotuner, Run
from .products import ROTATED_BYTES


def tune_levels(tuner: Autotuner, products: LevelsProducts, rows: int, like: torch.Tensor) -> None:
    """Of all shapes, for `rows` of ROW_BOUNDS and those above the bound below. Rows have the dtype
    and the device of `like`; those of 4 bytes have one launch and nothing to choose."""
    if like.element_size() != 2:
        return
    for shape, tuned in products.shapes.items():
        layers = _rotated(tuned.layers)
        x = torch.randn(rows, layers[0].inputs, device=like.device).to(like.dtype)
        launches = levels_candidates(rows, shape.outputs, layers[0].steps)
        named = {_name(launch): launch for launch in launches}
        runs: dict[str, Run] = {name: partial(_run, layers, x, one) for name, one in named.items()}
        what = f"product {_name_of(shape)}, rows {rows}, {str(like.dtype).removeprefix('torch.')}"
        read = sum(layer.weight_bytes for layer in layers)
        tuned.chosen[ROW_BOUNDS.index(rows)] = named[tuner.choose(what, runs, read)]


def _rotated(layers: Rows[LevelsLinear]) -> list[LevelsLinear]:
    """So many that none is in a cache when its turn comes again."""
    return list(layers[: -(-ROTATED_BYTES // layers[0].weight_bytes)])


def _run(layers: list[LevelsLinear], x: torch.Tensor, launch: SkinnyLaunch) -> torch.Tensor:
    """Computes all layers, and gives what the first one did."""
    return [layer.narrow(x, launch) for layer in layers][0]


def _name_of(shape: LevelsShape) -> str:
    group = f" by {shape.group}" if shape.group else ""
    zeros = ", zero points" if shape.zeros else ""
    return f"{shape.outputs}x{shape.inputs}, {shape.bits} bits{group} in runs of {shape.run}{zeros}"


def _name(launch: SkinnyLaunch) -> str:
    tile = f"{launch.columns}, parts {launch.splits}"
    return f"{tile}, warps {launch.warps}, stages {launch.stages}"
