"""Measures small-batch GEMMs with packed int4 or int8 weights: their tiles and parts."""

import torch

from ..kernels.triton.launch import ROW_BOUNDS, SmallBatchLaunch
from ..kernels.triton.packed_launch import packed_candidates
from ..operators.packed_linear import PackedProducts, PackedShape, PackedWeightLinear
from .autotuner import Autotuner
from .layers import dtype_name, enough_layers, parts_name, read_bytes, run_all


def tune_packed(tuner: Autotuner, products: PackedProducts, rows: int, like: torch.Tensor) -> None:
    """Tunes all shapes for `rows`, one of ROW_BOUNDS.

    The choice also serves smaller numbers of rows, down to the next lower bound. Rows have the
    dtype and the device of `like`; float32 has only one launch.
    """
    if like.element_size() != 2:
        return
    for shape, tuned in products.shapes.items():
        layers = enough_layers(tuned.layers)
        x = torch.randn(rows, layers[0].inputs, device=like.device).to(like.dtype)
        launches = packed_candidates(rows, shape.outputs, layers[0].steps)
        named = {_name(launch): launch for launch in launches}
        runs = {
            name: run_all(layers, PackedWeightLinear.small_batch, x, one)
            for name, one in named.items()
        }
        what = f"product {_name_of(shape)}, rows {rows}, {dtype_name(like.dtype)}"
        chosen = tuner.choose(what, runs, read_bytes(layers))
        tuned.chosen[ROW_BOUNDS.index(rows)] = named[chosen]


def _name_of(shape: PackedShape) -> str:
    group = f" by {shape.group}" if shape.group else ""
    zeros = ", zero points" if shape.zeros else ""
    return f"{shape.outputs}x{shape.inputs}, {shape.bits} bits{group} in runs of {shape.run}{zeros}"


def _name(launch: SmallBatchLaunch) -> str:
    return f"{launch.columns}, {parts_name(launch)}"
