"""Measures products of few rows with weights in 8-bit floats: rows rounded and multiplied as they
are for many, or weights widened on their way."""

import torch

from ..model.tuned_float8 import Float8Linear, Float8Products, Float8Shape
from ..triton_kernels.launch import ROW_BOUNDS
from .autotuner import Autotuner
from .layers import dtype_name, over, read_bytes, rotated, tile_name

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
        layers = rotated(tuned.layers)
        x = torch.randn(rows, shape.inputs, device=like.device).to(like.dtype)
        named = {tile_name(launch): launch for launch in shape.candidates}
        runs = {AS_MANY: over(layers, _many, x)} if shape.scaled else {}
        runs |= {name: over(layers, Float8Linear.few, x, one) for name, one in named.items()}
        what = f"product {_name_of(shape)}, rows {rows}, {dtype_name(like.dtype)}"
        chosen = tuner.choose(what, runs, read_bytes(layers), tolerance=TOLERANCE)
        tuned.choices[ROW_BOUNDS.index(rows)] = named.get(chosen)


def _many(layer: Float8Linear, x: torch.Tensor) -> torch.Tensor:
    return layer.many(x)


def _name_of(shape: Float8Shape) -> str:
    return f"{shape.outputs}x{shape.inputs}, fp8{f' by {shape.group}' if shape.group else ''}"
