"""Dense linear layers on CUDA devices: cuBLAS, or for few rows the kernels that were measured to be
faster for a shape. What was measured comes from outside (`tuning`); without it all is cuBLAS.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from ..attention.scratch import Scratch
from ..triton_kernels.dependent import DependentLaunches
from ..triton_kernels.launch import (
    ROW_BOUNDS,
    SkinnyLaunch,
    power_of_two,
    silu_candidates,
    skinny_candidates,
    tile_extent,
)
from ..triton_kernels.skinny import skinny_kernel, skinny_silu_kernel
from .layers import over_rows

HALVES = (torch.bfloat16, torch.float16)

Activation = Callable[[torch.Tensor], torch.Tensor]
# By the place of a number of rows in ROW_BOUNDS; None: as without measuring.
Choices = list[SkinnyLaunch | None]
# What kernels are told of a norm that is a part of them.
NormArguments = dict[str, Any]
NOT_DIVIDED: NormArguments = {"squares": None, "eps": None, "PARTS": 0, "ROOM": 1}
NOT_ADDED: NormArguments = {"residual": None, "norm": None, "ADD": False}


@dataclass(frozen=True, slots=True)
class ProductShape:
    outputs: int
    inputs: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class UndividedRows:
    """`rows` [T, H] times the weights of an RMS norm, to be divided by their root mean square,
    which comes of `squares` float32 [T, parts]: sums of the squares of the rows before that."""

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
class TunedShape:
    """All layers of one shape, and how they are computed: `plain`, and `silu` where the activation
    of a gated MLP is part of it."""

    layers: list["TunedLinear"] = field(default_factory=list)
    plain: Choices = field(default_factory=none_chosen)
    silu: Choices = field(default_factory=none_chosen)
    gated: bool = False


class Products:
    """The layers that one set of operators has made. Their steps run one behind the other, as they
    share scratch memory; `dependent` says how far a kernel may begin before its turn."""

    def __init__(self, dependent: DependentLaunches | None = None) -> None:
        self.shapes: dict[ProductShape, TunedShape] = {}
        self.dependent = dependent or DependentLaunches()
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
    """Whether the kernels multiply with it."""
    return weight.dtype in HALVES and weight.is_contiguous() and weight.dim() == 2


class TunedLinear:
    """`weight` [out, in] that the kernels take. With `silu_mul` of the product it can be one
    launch, where gate and up lie below each other."""

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
        self._dependent, self._scratch = products.dependent, products.scratch

    @property
    def weight_bytes(self) -> int:
        return self._weight.numel() * self._weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        launch = self._chosen(x, self._tuned.plain)
        return self.dense(x) if launch is None else self.skinny(x, launch)

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of the product, [..., out / 2]."""
        launch = self._chosen(x, self._tuned.silu)
        return self._silu_mul(self(x)) if launch is None else self.skinny_silu(x, launch)

    def mark_gated(self) -> None:
        """The activation will be asked for, so that it is worth measuring."""
        self._tuned.gated = True

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def skinny(self, x: torch.Tensor, launch: SkinnyLaunch) -> torch.Tensor:
        """For up to 64 rows."""

        def run(output: torch.Tensor, rows: torch.Tensor) -> None:
            self._launch(output, rows, launch, NOT_DIVIDED | NOT_ADDED)

        return over_rows(x, len(self._weight), run)

    def skinny_silu(self, x: torch.Tensor, launch: SkinnyLaunch) -> torch.Tensor:
        """For up to 64 rows."""

        def run(output: torch.Tensor, rows: torch.Tensor) -> None:
            self._launch_silu(output, rows, launch, NOT_DIVIDED)

        return over_rows(x, len(self._weight) // 2, run)

    def takes_norms(self, gated: bool = False) -> bool:
        """Whether `added`, `divided` and, if gated, `divided_activated` can be called. Products
        that were not yet divided may be beyond what 16-bit floats but bfloat16 hold."""
        return self._weight.dtype is torch.bfloat16 and bool(self._candidates(gated))

    def added(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> UndividedRows:
        """The norm of residual + product, which is written to `residual` [T, out]: for up to 64
        rows [T, in]."""
        launch = self._norm_launch(len(x))
        parts = -(-len(self._weight) // launch.columns)
        squares = residual.new_empty((len(x), parts), dtype=torch.float32)
        arguments = NOT_DIVIDED | {
            "residual": residual, "norm": norm, "squares": squares, "ADD": True,
        }  # fmt: skip

        def run(output: torch.Tensor, rows: torch.Tensor) -> None:
            self._launch(output, rows, launch, arguments)

        return UndividedRows(over_rows(x, len(self._weight), run), squares, eps)

    def divided(self, x: UndividedRows) -> torch.Tensor:
        output = x.rows.new_empty((len(x.rows), len(self._weight)))
        launch = self._norm_launch(len(x.rows))
        self._launch(output, x.rows, launch, x.arguments | NOT_ADDED)
        return output

    def divided_activated(self, x: UndividedRows) -> torch.Tensor:
        output = x.rows.new_empty((len(x.rows), len(self._weight) // 2))
        launch = self._norm_launch(len(x.rows), gated=True)
        self._launch_silu(output, x.rows, launch, x.arguments)
        return output

    def _norm_launch(self, rows: int, gated: bool = False) -> SkinnyLaunch:
        """What was chosen, if it is no cuBLAS's."""
        choices = self._tuned.silu if gated else self._tuned.plain
        return choices[bisect_left(ROW_BOUNDS, rows)] or self._candidates(gated)[0]

    def _candidates(self, gated: bool) -> list[SkinnyLaunch]:
        outputs, inputs = self._weight.shape
        if gated:
            return silu_candidates(inputs, outputs // 2)
        return skinny_candidates(inputs, outputs)

    def _chosen(self, x: torch.Tensor, choices: Choices) -> SkinnyLaunch | None:
        rows = x.numel() // x.shape[-1]
        if rows > ROW_BOUNDS[-1] or x.dtype is not self._weight.dtype:
            return None
        return choices[bisect_left(ROW_BOUNDS, rows)]

    def _launch(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        launch: SkinnyLaunch,
        norm: NormArguments,
    ) -> None:
        outputs, inputs = self._weight.shape
        height, tiles = tile_extent(len(rows)), -(-outputs // launch.columns)
        partial, arrived = self._scratch.split(
            tiles, launch.splits, launch.columns * height, rows.device
        )
        skinny_kernel[(tiles, launch.splits)](
            output, partial, arrived, rows, self._weight, self._bias, len(rows), launch.splits,
            inputs, outputs, rows.stride(0), self._ahead(launch), BIAS=self._bias is not None,
            SPLIT=launch.splits > 1, ROWS=height, COLUMNS=launch.columns, DEPTH=launch.depth,
            **self._dependent.product, LINES=self._dependent.lines, **norm,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip

    def _launch_silu(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        launch: SkinnyLaunch,
        norm: NormArguments,
    ) -> None:
        outputs, inputs = len(self._weight) // 2, self._weight.shape[1]
        skinny_silu_kernel[(-(-outputs // launch.columns),)](
            output, rows, self._weight, self._bias, len(rows), inputs, outputs, rows.stride(0),
            self._ahead(launch), BIAS=self._bias is not None, ROWS=tile_extent(len(rows)),
            COLUMNS=launch.columns, DEPTH=launch.depth,
            **self._dependent.product, LINES=self._dependent.lines, **norm,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip

    def _ahead(self, launch: SkinnyLaunch) -> int:
        """Bytes of each row of weights that a program asks for before it waits; what is asked for
        begins at a multiple of 16 bytes."""
        if self._weight.data_ptr() % 16:
            return 0
        outputs, inputs = self._weight.shape
        row_bytes = inputs * self._weight.element_size() // launch.splits
        return self._dependent.prefetched(outputs * launch.splits, row_bytes)
