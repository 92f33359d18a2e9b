"""Dense linear layers on CUDA devices: cuBLAS, or for few rows the kernels that `autotune` measured
to be faster for a shape. Unmeasured shapes use cuBLAS."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.nn import functional as F

from ..device.scratch import Scratch
from ..kernels.triton.dependent_launch import DependentLaunches
from ..kernels.triton.launch import (
    ROW_BOUNDS,
    SmallBatchLaunch,
    VectorLaunch,
    power_of_two,
    silu_candidates,
    small_batch_candidates,
    tile_extent,
)
from ..kernels.triton.small_batch_gemm import small_batch_kernel, small_batch_silu_kernel
from ..kernels.triton.vector_product import vector_product_kernel
from ..layers.layers import over_rows

HALVES = (torch.bfloat16, torch.float16)

Layer = TypeVar("Layer")
Activation = Callable[[torch.Tensor], torch.Tensor]
FewRowsLaunch = SmallBatchLaunch | VectorLaunch
# By index in ROW_BOUNDS; None: the default launch.
Choices = list[FewRowsLaunch | None]
# Kernel arguments for a norm that is fused into a product.
NormArguments = dict[str, Any]
NO_NORM_BEFORE: NormArguments = {"squares": None, "eps": None, "PARTS": 0, "ROOM": 1}
NO_NORM_AFTER: NormArguments = {"residual": None, "norm": None, "ADD": False}


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The shape of a weight [outputs, inputs] for which launches are measured."""

    outputs: int
    inputs: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DeferredNormRows:
    """Rows [T, H] times the weights of an RMS norm, not yet divided by their root mean square.
    `squares` float32 [T, parts] are sums of the squares of the rows before the multiplication."""

    rows: torch.Tensor
    squares: torch.Tensor
    eps: float

    @property
    def arguments(self) -> NormArguments:
        parts = self.squares.shape[1]
        return {
            "squares": self.squares, "eps": self.eps, "PARTS": parts, "ROOM": power_of_two(parts),
        }  # fmt: skip


def none_chosen() -> Choices:
    return [None] * len(ROW_BOUNDS)


@dataclass(slots=True)
class TunedLayers(Generic[Layer]):
    """All layers of one shape and their measured launches."""

    layers: list[Layer] = field(default_factory=list)
    chosen: Choices = field(default_factory=none_chosen)


@dataclass(slots=True)
class TunedShape(TunedLayers["TunedLinear"]):
    """Dense layers. `own` are the fastest launches of this project's kernels, where cuBLAS is
    faster; `silu` are those of layers with the activation of a gated MLP."""

    own: Choices = field(default_factory=none_chosen)
    silu: list[SmallBatchLaunch | None] = field(default_factory=lambda: [None] * len(ROW_BOUNDS))
    gated: bool = False


class Products:
    """The layers that one set of operators has made. They share scratch memory, so their steps must
    not overlap. `dependent_launches` says when their kernels begin."""

    def __init__(self, dependent_launches: DependentLaunches | None = None) -> None:
        self.shapes: dict[ProductShape, TunedShape] = {}
        self.dependent_launches = dependent_launches or DependentLaunches()
        self.scratch = Scratch()

    def layer(
        self, weight: torch.Tensor, bias: torch.Tensor | None, silu_mul: Activation
    ) -> "TunedLinear":
        shape = ProductShape(weight.shape[0], weight.shape[1], weight.dtype)
        tuned = self.shapes.setdefault(shape, TunedShape())
        made = TunedLinear(weight, bias, silu_mul, tuned, self)
        tuned.layers.append(made)
        return made


def takes(weight: torch.Tensor) -> bool:
    """Whether the kernels support such a weight."""
    return weight.dtype in HALVES and weight.is_contiguous() and weight.dim() == 2


class TunedLinear:
    """A layer with a `weight` [out, in] that the kernels support. If gate and up are stacked in it,
    the product and `silu_mul` can be one launch."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        silu_mul: Activation,
        tuned: TunedShape,
        products: Products,
    ) -> None:
        self._weight, self._bias = weight, bias
        self._silu_mul, self._tuned = silu_mul, tuned
        self._dependent_launches, self._scratch = products.dependent_launches, products.scratch

    @property
    def weight_bytes(self) -> int:
        return self._weight.numel() * self._weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        place = self._place(x)
        if place is None:
            return self.dense(x)
        own = self._tuned.own[place] if self._dependent_launches.own_products else None
        launch = own or self._tuned.chosen[place]
        return self.dense(x) if launch is None else self.small_batch(x, launch)

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of the product: [..., out / 2]."""
        place = self._place(x)
        launch = None if place is None else self._tuned.silu[place]
        return self._silu_mul(self(x)) if launch is None else self.small_batch_silu(x, launch)

    def mark_gated(self) -> None:
        """Says that `activated` will be called, so that measuring it pays."""
        self._tuned.gated = True

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def small_batch(self, x: torch.Tensor, launch: FewRowsLaunch) -> torch.Tensor:
        """Computes up to 64 rows; with a VectorLaunch, one."""

        def run(output: torch.Tensor, rows: torch.Tensor) -> None:
            if isinstance(launch, VectorLaunch):
                launch_vector_product(
                    output, rows, self._weight, self._bias, launch, self._dependent_launches
                )
            else:
                self._launch(output, rows, launch, NO_NORM_BEFORE | NO_NORM_AFTER)

        return over_rows(x, len(self._weight), run)

    def small_batch_silu(self, x: torch.Tensor, launch: SmallBatchLaunch) -> torch.Tensor:
        """Computes up to 64 rows with the activation."""

        def run(output: torch.Tensor, rows: torch.Tensor) -> None:
            self._launch_silu(output, rows, launch, NO_NORM_BEFORE)

        return over_rows(x, len(self._weight) // 2, run)

    def can_fuse_norms(self, gated: bool = False) -> bool:
        """Whether `linear_add_norm`, `norm_linear` and, if gated, `norm_linear_silu` can be called.
        Of the 16-bit floats only bfloat16 holds products that are not yet divided."""
        return self._weight.dtype is torch.bfloat16 and bool(self._candidates(gated))

    def linear_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> DeferredNormRows:
        """The norm of residual + product, for up to 64 rows [T, in]. Writes the sum to `residual`
        [T, out]."""
        launch = self._norm_launch(len(x))
        parts = -(-len(self._weight) // launch.columns)
        squares = residual.new_empty((len(x), parts), dtype=torch.float32)
        arguments = NO_NORM_BEFORE | {
            "residual": residual, "norm": norm, "squares": squares, "ADD": True,
        }  # fmt: skip

        def run(output: torch.Tensor, rows: torch.Tensor) -> None:
            self._launch(output, rows, launch, arguments)

        return DeferredNormRows(over_rows(x, len(self._weight), run), squares, eps)

    def norm_linear(self, x: DeferredNormRows) -> torch.Tensor:
        output = x.rows.new_empty((len(x.rows), len(self._weight)))
        launch = self._norm_launch(len(x.rows))
        self._launch(output, x.rows, launch, x.arguments | NO_NORM_AFTER)
        return output

    def norm_linear_silu(self, x: DeferredNormRows) -> torch.Tensor:
        output = x.rows.new_empty((len(x.rows), len(self._weight) // 2))
        launch = self._norm_launch(len(x.rows), gated=True)
        self._launch_silu(output, x.rows, launch, x.arguments)
        return output

    def _norm_launch(self, rows: int, gated: bool = False) -> SmallBatchLaunch:
        """The chosen launch; the first candidate if another kernel was chosen."""
        choices = self._tuned.silu if gated else self._tuned.chosen
        chosen = choices[bisect_left(ROW_BOUNDS, rows)]
        return chosen if isinstance(chosen, SmallBatchLaunch) else self._candidates(gated)[0]

    def _candidates(self, gated: bool) -> list[SmallBatchLaunch]:
        outputs, inputs = self._weight.shape
        if gated:
            return silu_candidates(inputs, outputs // 2)
        return small_batch_candidates(inputs, outputs)

    def _place(self, x: torch.Tensor) -> int | None:
        """Index in ROW_BOUNDS; None for rows that only cuBLAS multiplies."""
        rows = x.numel() // x.shape[-1]
        if rows > ROW_BOUNDS[-1] or x.dtype is not self._weight.dtype:
            return None
        return bisect_left(ROW_BOUNDS, rows)

    def _launch(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        launch: SmallBatchLaunch,
        norm: NormArguments,
    ) -> None:
        outputs, inputs = self._weight.shape
        height, tiles = tile_extent(len(rows)), -(-outputs // launch.columns)
        partial, arrived = self._scratch.split(
            tiles, launch.splits, launch.columns * height, rows.device
        )
        small_batch_kernel[(tiles, launch.splits)](
            output, partial, arrived, rows, self._weight, self._bias, len(rows), launch.splits,
            inputs, outputs, rows.stride(0), self._ahead(launch), BIAS=self._bias is not None,
            SPLIT=launch.splits > 1, ROWS=height, COLUMNS=launch.columns, DEPTH=launch.depth,
            **self._dependent_launches.product, LINES=self._dependent_launches.lines, **norm,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip

    def _launch_silu(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        launch: SmallBatchLaunch,
        norm: NormArguments,
    ) -> None:
        outputs, inputs = len(self._weight) // 2, self._weight.shape[1]
        small_batch_silu_kernel[(-(-outputs // launch.columns),)](
            output, rows, self._weight, self._bias, len(rows), inputs, outputs, rows.stride(0),
            self._ahead(launch), BIAS=self._bias is not None, ROWS=tile_extent(len(rows)),
            COLUMNS=launch.columns, DEPTH=launch.depth,
            **self._dependent_launches.product, LINES=self._dependent_launches.lines, **norm,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip

    def _ahead(self, launch: SmallBatchLaunch) -> int:
        """Bytes of each row of weights that a program prefetches before it waits; prefetches begin
        at multiples of 16 bytes."""
        if self._weight.data_ptr() % 16:
            return 0
        outputs, inputs = self._weight.shape
        row_bytes = inputs * self._weight.element_size() // launch.splits
        return self._dependent_launches.prefetched(outputs * launch.splits, row_bytes)


def launch_vector_product(
    output: torch.Tensor,
    row: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    launch: VectorLaunch,
    dependent_launches: DependentLaunches,
    scales: torch.Tensor | None = None,
    as_bytes: bool = False,
) -> None:
    """output [1, outputs] = row [1, inputs] . weight^T (+ bias); weights of 8-bit floats have
    `scales` [outputs, 1] and may be stored `as_bytes`."""
    outputs, inputs = weight.shape
    vector_product_kernel[(-(-outputs // launch.columns),)](
        output, row, weight, scales, bias, inputs, outputs,
        0 if scales is None else scales.stride(0), BIAS=bias is not None,
        SCALED=scales is not None, BITS=as_bytes, COLUMNS=launch.columns, DEPTH=launch.depth,
        PARTS=inputs // launch.depth, **dependent_launches.product, num_warps=launch.warps,
    )  # fmt: skip
