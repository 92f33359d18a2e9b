"""Measures products of few rows with weights in whole numbers: tiles and parts."""

import torch

from ..model.levels_linear import LevelsLinear, LevelsProducts, LevelsShape
from ..triton_kernels.launch import ROW_BOUNDS, SkinnyLaunch
from ..triton_kernels.levels_launch import levels_candidates
from .autotuner import Autotuner
from .layers import dtype_name, over, parts_name, read_bytes, rotated


def tune_levels(tuner: Autotuner, products: LevelsProducts, rows: int, like: torch.Tensor) -> None:
    """Of all shapes, for `rows` of ROW_BOUNDS and those above the bound below. Rows have the dtype
    and the device of `like`; those of 4 bytes have one launch and nothing to choose."""
    if like.element_size() != 2:
        return
    for shape, tuned in products.shapes.items():
        layers = rotated(tuned.layers)
        x = torch.randn(rows, layers[0].inputs, device=like.device).to(like.dtype)
        launches = levels_candidates(rows, shape.outputs, layers[0].steps)
        named = {_name(launch): launch for launch in launches}
        runs = {name: over(layers, LevelsLinear.narrow, x, one) for name, one in named.items()}
        what = f"product {_name_of(shape)}, rows {rows}, {dtype_name(like.dtype)}"
        chosen = tuner.choose(what, runs, read_bytes(layers))
        tuned.chosen[ROW_BOUNDS.index(rows)] = named[chosen]


def _name_of(shape: LevelsShape) -> str:
    group = f" by {shape.group}" if shape.group else ""
    zeros = ", zero points" if shape.zeros else ""
    return f"{shape.outputs}x{shape.inputs}, {shape.bits} bits{group} in runs of {shape.run}{zeros}"


def _name(launch: SkinnyLaunch) -> str:
    return f"{launch.columns}, {parts_name(launch)}"
