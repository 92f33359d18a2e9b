"""Linear layers with 8-bit float weights on CUDA devices. For few rows, a kernel converts weights
while it multiplies, if `autotune` measured it to be faster or if no other kernel supports the
shape; otherwise `float8_linear` computes."""

from bisect import bisect_left
from dataclasses import dataclass, replace

import torch

from ..device.scratch import Scratch
from ..kernels.triton.dependent_launch import DependentLaunches
from ..kernels.triton.launch import (
    ROW_BOUNDS,
    SmallBatchLaunch,
    VectorLaunch,
    float8_candidates,
    tile_extent,
    vector_candidates,
)
from ..kernels.triton.small_batch_gemm_float8 import small_batch_float8_kernel
from ..layers.float8_linear import ScaledLinear, make_float8
from ..layers.float8_weight import FLOAT8, Float8Weight
from ..layers.fp8_cache import storage
from ..layers.layers import Linear, over_rows
from .tuned_linear import (
    HALVES,
    Choices,
    FewRowsLaunch,
    TunedLayers,
    launch_vector_product,
    none_chosen,
)


@dataclass(frozen=True, slots=True)
class Float8Shape:
    """The shape for which launches are measured. `group` inputs share a scale; 0: all inputs of an
    output do. `scaled`: rows may be rounded, for a product of 8-bit floats."""

    outputs: int
    inputs: int
    group: int
    scaled: bool

    @property
    def candidates(self) -> list[SmallBatchLaunch]:
        return float8_candidates(self.inputs, self.outputs, self.group)

    @property
    def vector_candidates(self) -> list[VectorLaunch]:
        return [] if self.group else vector_candidates(self.inputs, 1)


class Float8Products:
    """The layers that one set of operators has made.

    `dependent_launches` has their options for programmatic dependent launch. They share scratch
    memory, so their steps must not overlap.
    """

    def __init__(self, dependent_launches: DependentLaunches | None = None) -> None:
        self.shapes: dict[Float8Shape, TunedLayers[Float8Linear]] = {}
        self.dependent_launches, self.scratch = dependent_launches or DependentLaunches(), Scratch()

    def layer(
        self,
        weight: Float8Weight,
        bias: torch.Tensor | None,
        device: torch.device,
        capability: tuple[int, int],
    ) -> Linear | None:
        """Makes a layer; None if no kernel supports its size."""
        values, scales = (one.contiguous().to(device) for one in (weight.values, weight.scales))
        placed = replace(weight, values=values, scales=scales)
        many = make_float8(placed, bias, device, capability)
        if many is None:
            return None
        shape = Float8Shape(*weight.shape, weight.own_group, isinstance(many, ScaledLinear))
        if not shape.candidates:
            return many
        tuned = self.shapes.setdefault(shape, TunedLayers(chosen=_defaults(shape)))
        made = Float8Linear(placed, bias, many, tuned, self, capability)
        tuned.layers.append(made)
        return made


def _defaults(shape: Float8Shape) -> Choices:
    """Unmeasured launches: layers that round rows need none."""
    return none_chosen() if shape.scaled else [shape.candidates[0]] * len(ROW_BOUNDS)


class Float8Linear:
    """Uses `tuned`'s launch for few rows; if there is none, or for more rows, `many`."""

    def __init__(
        self,
        weight: Float8Weight,
        bias: torch.Tensor | None,
        many: Linear,
        tuned: TunedLayers["Float8Linear"],
        products: Float8Products,
        capability: tuple[int, int],
    ) -> None:
        self._stored = storage(FLOAT8, capability)
        (self._weight,) = self._stored.views([weight.values])
        self._scales, self._bias = weight.scales, bias
        self._group = weight.own_group
        self.many, self._tuned = many, tuned
        self._dependent_launches, self._scratch = products.dependent_launches, products.scratch

    @property
    def weight_bytes(self) -> int:
        return self._weight.numel() + 4 * self._scales.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        few = 0 < rows <= ROW_BOUNDS[-1] and x.dtype in HALVES
        launch = self._tuned.chosen[bisect_left(ROW_BOUNDS, rows)] if few else None
        return self.many(x) if launch is None else self.small_batch(x, launch)

    def small_batch(self, x: torch.Tensor, launch: FewRowsLaunch) -> torch.Tensor:
        """Computes up to 64 rows of 2 bytes an element; with a VectorLaunch, one."""

        def run(output: torch.Tensor, rows: torch.Tensor) -> None:
            if isinstance(launch, VectorLaunch):
                launch_vector_product(
                    output, rows, self._weight, self._bias, launch, self._dependent_launches,
                    self._scales, self._stored.as_bytes,
                )  # fmt: skip
            else:
                self._launch(output, rows, launch)

        return over_rows(x, len(self._weight), run)

    def _launch(self, output: torch.Tensor, rows: torch.Tensor, launch: SmallBatchLaunch) -> None:
        outputs, inputs = self._weight.shape
        height, tiles = tile_extent(len(rows)), -(-outputs // launch.columns)
        partial, arrived = self._scratch.split(
            tiles, launch.splits, launch.columns * height, rows.device
        )
        ahead = self._dependent_launches.prefetched(
            outputs * launch.splits, inputs // launch.splits
        )
        small_batch_float8_kernel[(tiles, launch.splits)](
            output, partial, arrived, rows, self._weight, self._scales, self._bias, len(rows),
            launch.splits, inputs, outputs, rows.stride(0), self._scales.stride(0), ahead,
            BIAS=self._bias is not None, SPLIT=launch.splits > 1, GROUP=self._group,
            BITS=self._stored.as_bytes, ROWS=height, COLUMNS=launch.columns, DEPTH=launch.depth,
            **self._dependent_launches.product, LINES=self._dependent_launches.lines,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
