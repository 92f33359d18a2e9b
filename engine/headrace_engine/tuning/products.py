"""Measures dense products of few rows, and their fusion with a gated MLP's activation."""

from collections.abc import Sequence as Rows
from functools import partial

import torch

from ..model.tuned_linear import Products, ProductShape, TunedLinear, TunedShape
from ..triton_kernels.launch import ROW_BOUNDS, SkinnyLaunch, silu_candidates, skinny_candidates
from .autotuner import Autotuner, Run

# Bytes that one measurement reads at least, where there are so many: several times the last cache.
ROTATED_BYTES = 256 << 20
CUBLAS, APART = "cuBLAS", "apart"


def tune_products(tuner: Autotuner, products: Products, rows: int, device: torch.device) -> None:
    """Of all shapes, for `rows` of ROW_BOUNDS and those above the bound below."""
    for shape, tuned in products.shapes.items():
        x = torch.randn(rows, shape.inputs, device=device).to(shape.dtype)
        layers, place = _rotated(tuned.layers), ROW_BOUNDS.index(rows)
        launches = skinny_candidates(shape.inputs, shape.outputs)
        what = f"product {shape.outputs}x{shape.inputs}, rows {rows}"
        what += f", {str(shape.dtype).removeprefix('torch.')}"
        runs: dict[str, Run] = {CUBLAS: partial(_dense, layers, x)}
        runs |= {_name(launch): partial(_skinny, layers, x, launch) for launch in launches}
        tuned.plain[place] = _choose(tuner, what, runs, launches, _bytes(layers))
        if tuned.gated:
            _tune_silu(tuner, what, shape, tuned, x)


def _tune_silu(
    tuner: Autotuner, what: str, shape: ProductShape, tuned: TunedShape, x: torch.Tensor
) -> None:
    layers, place = _rotated(tuned.layers), ROW_BOUNDS.index(len(x))
    launches = silu_candidates(shape.inputs, shape.outputs // 2)
    runs: dict[str, Run] = {APART: partial(_activated, layers, x)}
    runs |= {_name(launch): partial(_skinny_silu, layers, x, launch) for launch in launches}
    tuned.silu[place] = _choose(tuner, f"{what}, SiLU", runs, launches, _bytes(layers))


def _choose(
    tuner: Autotuner,
    what: str,
    runs: dict[str, Run],
    launches: list[SkinnyLaunch],
    read_bytes: int,
) -> SkinnyLaunch | None:
    chosen = tuner.choose(what, runs, read_bytes)
    return next((launch for launch in launches if _name(launch) == chosen), None)


def _rotated(layers: Rows[TunedLinear]) -> list[TunedLinear]:
    """So many that none is in a cache when its turn comes again."""
    return list(layers[: -(-ROTATED_BYTES // layers[0].weight_bytes)])


def _bytes(layers: list[TunedLinear]) -> int:
    return sum(layer.weight_bytes for layer in layers)


# Each computes all layers, and gives what the first one did.


def _dense(layers: list[TunedLinear], x: torch.Tensor) -> torch.Tensor:
    return [one.dense(x) for one in layers][0]


def _skinny(layers: list[TunedLinear], x: torch.Tensor, launch: SkinnyLaunch) -> torch.Tensor:
    return [one.skinny(x, launch) for one in layers][0]


def _activated(layers: list[TunedLinear], x: torch.Tensor) -> torch.Tensor:
    return [one.activated(x) for one in layers][0]


def _skinny_silu(layers: list[TunedLinear], x: torch.Tensor, launch: SkinnyLaunch) -> torch.Tensor:
    return [one.skinny_silu(x, launch) for one in layers][0]


def _name(launch: SkinnyLaunch) -> str:
    tile = f"{launch.columns}x{launch.depth}, parts {launch.splits}"
    return f"{tile}, warps {launch.warps}, stages {launch.stages}"
