"""Measures small-batch GEMMs of dense layers, and their fusion with a gated MLP's activation."""

import torch

from ..kernels.triton.launch import (
    ROW_BOUNDS,
    silu_candidates,
    small_batch_candidates,
    vector_candidates,
)
from ..operators.tuned_linear import (
    FewRowsLaunch,
    Products,
    ProductShape,
    TunedLinear,
    TunedShape,
)
from .autotuner import Autotuner
from .layers import dtype_name, enough_layers, read_bytes, run_all, tile_name, vector_name

# Names in the table of measured kernels. "apart": the activation is a kernel of its own.
CUBLAS, APART = "cuBLAS", "apart"


def tune_products(tuner: Autotuner, products: Products, rows: int, device: torch.device) -> None:
    """Tunes all shapes for `rows`, one of ROW_BOUNDS.

    The choice also serves smaller numbers of rows, down to the next lower bound.
    """
    for shape, tuned in products.shapes.items():
        x = torch.randn(rows, shape.inputs, device=device).to(shape.dtype)
        layers, place = enough_layers(tuned.layers), ROW_BOUNDS.index(rows)
        named: dict[str, FewRowsLaunch] = {
            tile_name(one): one for one in small_batch_candidates(shape.inputs, shape.outputs)
        }
        if rows == 1:
            found = vector_candidates(shape.inputs, shape.dtype.itemsize)
            named |= {vector_name(one): one for one in found}
        what = f"product {shape.outputs}x{shape.inputs}, rows {rows}, {dtype_name(shape.dtype)}"
        runs = {
            name: run_all(layers, TunedLinear.small_batch, x, one) for name, one in named.items()
        }
        every = {CUBLAS: run_all(layers, TunedLinear.dense, x), **runs}
        tuned.chosen[place] = named.get(tuner.choose(what, every, read_bytes(layers)))
        if tuned.chosen[place] is None and named:
            own = tuner.choose(f"{what}, own", runs, read_bytes(layers))
            tuned.own[place] = named[own]
        if tuned.gated:
            _tune_silu(tuner, what, shape, tuned, x)


def _tune_silu(
    tuner: Autotuner, what: str, shape: ProductShape, tuned: TunedShape, x: torch.Tensor
) -> None:
    layers, place = enough_layers(tuned.layers), ROW_BOUNDS.index(len(x))
    launches = silu_candidates(shape.inputs, shape.outputs // 2)
    named = {tile_name(launch): launch for launch in launches}
    runs = {APART: run_all(layers, TunedLinear.activated, x)}
    runs |= {
        name: run_all(layers, TunedLinear.small_batch_silu, x, one) for name, one in named.items()
    }
    tuned.silu[place] = named.get(tuner.choose(f"{what}, SiLU", runs, read_bytes(layers)))
