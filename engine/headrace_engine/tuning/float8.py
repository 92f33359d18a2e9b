"""Measures products of few rows with weights in 8-bit floats: rows rounded and multiplied as they
are for many, or weights widened on their way."""

from collections.abc import Sequence as Rows
from functools import partial

import torch

from ..model.tuned_float8 import Float8Linear, Float8Products, Float8Shape
from ..triton_kernels.launch import ROW_BOUNDS, SkinnyLaunch
from .autotuner import Autotuner, Run
from .products import ROTATED_BYTES

AS_MANY = "as for many rows"
# Rows rounded to 8 bits, of which 4 are their fraction's, are off by 2 to 3 %; those that are not
# rounded are closer to what is wanted.
TOLERANCE = 0.06


def tune_float8(tuner: Autotuner, products: Float8Products, rows: int, like: torch.Tensor) -> None:
    """Of all shapes, for `rows` of ROW_BOUNDS and those above the bound below. Rows have the dtype
    and the device of `like`."""
    if like.element_size() != 2:
        return
    for shape, tuned in products.shapes.items():
        layers = _rotated(tuned.layers)
        x = torch.randn(rows, shape.inputs, device=like.device).to(like.dtype)
        named = {_name(launch): launch for launch in shape.candidates}
        runs: dict[str, Run] = {AS_MANY: partial(_many, layers, x)} if shape.scaled else {}
        runs |= {name: partial(_few, layers, x, one) for name, one in named.items()}
        what = f"product {_name_of(shape)}, rows {rows}, {str(like.dtype).removeprefix('torch.')}"
        read = sum(layer.weight_bytes for layer in layers)
        chosen = tuner.choose(what, runs, read, tolerance=TOLERANCE)
        tuned.choices[ROW_BOUNDS.index(rows)] = named.get(chosen)


def _rotated(layers: Rows[Float8Linear]) -> list[Float8Linear]:
    """So many that none is in a cache when its turn comes again."""
    return list(layers[: -(-ROTATED_BYTES // layers[0].weight_bytes)])


# Each computes all layers, and gives what the first one did.


def _many(layers: list[Float8Linear], x: torch.Tensor) -> torch.Tensor:
    return [layer.many(x) for layer in layers][0]


def _few(layers: list[Float8Linear], x: torch.Tensor, launch: SkinnyLaunch) -> torch.Tensor:
    return [layer.few(x, launch) for layer in layers][0]


def _name_of(shape: Float8Shape) -> str:
    return f"{shape.outputs}x{shape.inputs}, fp8{f' by {shape.group}' if shape.group else ''}"


def _name(launch: SkinnyLaunch) -> str:
    tile = f"{launch.columns}x{launch.depth}, parts {launch.splits}"
    return f"{tile}, warps {launch.warps}, stages {launch.stages}"
