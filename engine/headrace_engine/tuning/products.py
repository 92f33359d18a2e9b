"""Measures dense products of few rows, and their fusion with a gated MLP's activation."""

import torch

from ..model.tuned_linear import Products, ProductShape, TunedLinear, TunedShape
from ..triton_kernels.launch import ROW_BOUNDS, SkinnyLaunch, silu_candidates, skinny_candidates
from .autotuner import Autotuner, Run
from .layers import dtype_name, over, read_bytes, rotated, tile_name

CUBLAS, APART = "cuBLAS", "apart"


def tune_products(tuner: Autotuner, products: Products, rows: int, device: torch.device) -> None:
    """Of all shapes, for `rows` of ROW_BOUNDS and those above the bound below."""
    for shape, tuned in products.shapes.items():
        x = torch.randn(rows, shape.inputs, device=device).to(shape.dtype)
        layers, place = rotated(tuned.layers), ROW_BOUNDS.index(rows)
        launches = skinny_candidates(shape.inputs, shape.outputs)
        named = {tile_name(launch): launch for launch in launches}
        what = f"product {shape.outputs}x{shape.inputs}, rows {rows}, {dtype_name(shape.dtype)}"
        runs = {CUBLAS: over(layers, TunedLinear.dense, x)}
        runs |= {name: over(layers, TunedLinear.skinny, x, one) for name, one in named.items()}
        tuned.plain[place] = _choose(tuner, what, runs, named, layers)
        if tuned.gated:
            _tune_silu(tuner, what, shape, tuned, x)


def _tune_silu(
    tuner: Autotuner, what: str, shape: ProductShape, tuned: TunedShape, x: torch.Tensor
) -> None:
    layers, place = rotated(tuned.layers), ROW_BOUNDS.index(len(x))
    launches = silu_candidates(shape.inputs, shape.outputs // 2)
    named = {tile_name(launch): launch for launch in launches}
    runs = {APART: over(layers, TunedLinear.activated, x)}
    runs |= {name: over(layers, TunedLinear.skinny_silu, x, one) for name, one in named.items()}
    tuned.silu[place] = _choose(tuner, f"{what}, SiLU", runs, named, layers)


def _choose(
    tuner: Autotuner,
    what: str,
    runs: dict[str, Run],
    named: dict[str, SkinnyLaunch],
    layers: list[TunedLinear],
) -> SkinnyLaunch | None:
    return named.get(tuner.choose(what, runs, read_bytes(layers)))
