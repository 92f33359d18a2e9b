"""Measures small-batch GEMMs with 8-bit float weights.

Either rows are rounded and multiplied like many rows, or the kernel converts weights while it
multiplies.
"""

import torch

from ..kernels.triton.launch import ROW_BOUNDS
from ..operators.tuned_float8 import Float8Linear, Float8Products, Float8Shape
from ..operators.tuned_linear import FewRowsLaunch
from .autotuner import Autotuner
from .layers import dtype_name, enough_layers, read_bytes, run_all, tile_name, vector_name

AS_MANY = "as for many rows"
# Rounding rows to 8 bits, with 4 bits of precision, causes errors of 2 to 3 %; unrounded rows are
# closer to the exact result.
TOLERANCE = 0.06


def tune_float8(tuner: Autotuner, products: Float8Products, rows: int, like: torch.Tensor) -> None:
    """Tunes all shapes for `rows`, one of ROW_BOUNDS.

    The choice also serves smaller numbers of rows, down to the next lower bound. Rows have the
    dtype and the device of `like`.
    """
    if like.element_size() != 2:
        return
    for shape, tuned in products.shapes.items():
        layers = enough_layers(tuned.layers)
        x = torch.randn(rows, shape.inputs, device=like.device).to(like.dtype)
        named: dict[str, FewRowsLaunch] = {tile_name(one): one for one in shape.candidates}
        if rows == 1:
            named |= {vector_name(one): one for one in shape.vector_candidates}
        runs = {AS_MANY: run_all(layers, _many, x)} if shape.scaled else {}
        runs |= {
            name: run_all(layers, Float8Linear.small_batch, x, one) for name, one in named.items()
        }
        what = f"product {_name_of(shape)}, rows {rows}, {dtype_name(like.dtype)}"
        chosen = tuner.choose(what, runs, read_bytes(layers), tolerance=TOLERANCE)
        tuned.chosen[ROW_BOUNDS.index(rows)] = named.get(chosen)


def _many(layer: Float8Linear, x: torch.Tensor) -> torch.Tensor:
    return layer.many(x)


def _name_of(shape: Float8Shape) -> str:
    return f"{shape.outputs}x{shape.inputs}, fp8{f' by {shape.group}' if shape.group else ''}"
