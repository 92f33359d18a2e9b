"""Measures small-batch GEMMs of dense layers, and their fusion with a gated MLP's activation."""

import torch

from ..kernels.triton.launch import (
    ROW_BOUNDS,
    SmallBatchLaunch,
    silu_candidates,
    small_batch_candidates,
)
from ..operators.tuned_linear import Products, ProductShape, TunedLinear, TunedShape
from .autotuner import Autotuner, Run
from .layers import dtype_name, enough_layers, read_bytes, run_all, tile_name

# Names in the table of measured kernels. "apart": the activation is a kernel of its own.
CUBLAS, APART = "cuBLAS", "apart"


def tune_products(tuner: Autotuner, products: Products, rows: int, device: torch.device) -> None:
    """Tunes all shapes for `rows`, one of ROW_BOUNDS.

    The choice also serves smaller numbers of rows, down to the next lower bound.
    """
    for shape, tuned in products.shapes.items():
        x = torch.randn(rows, shape.inputs, device=device).to(shape.dtype)
        layers, place = enough_layers(tuned.layers), ROW_BOUNDS.index(rows)
        launches = small_batch_candidates(shape.inputs, shape.outputs)
        named = {tile_name(launch): launch for launch in launches}
        what = f"product {shape.outputs}x{shape.inputs}, rows {rows}, {dtype_name(shape.dtype)}"
        runs = {CUBLAS: run_all(layers, TunedLinear.dense, x)}
        runs |= {
            name: run_all(layers, TunedLinear.small_batch, x, one) for name, one in named.items()
        }
        tuned.chosen[place] = _choose(tuner, what, runs, named, layers)
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
    tuned.silu[place] = _choose(tuner, f"{what}, SiLU", runs, named, layers)


def _choose(
    tuner: Autotuner,
    what: str,
    runs: dict[str, Run],
    named: dict[str, SmallBatchLaunch],
    layers: list[TunedLinear],
) -> SmallBatchLaunch | None:
    return named.get(tuner.choose(what, runs, read_bytes(layers)))
