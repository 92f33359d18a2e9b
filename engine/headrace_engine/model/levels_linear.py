"""Linear layers with weights in whole numbers of 4 or 8 bits, on CUDA devices through Triton.

Few rows are multiplied with weights that are widened on their way; for many the matrix is made
whole, into memory that all layers share, and multiplied by cuBLAS.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from ..attention.scratch import Scratch
from ..triton_kernels.dependent import DependentLaunches
from ..triton_kernels.launch import ROW_BOUNDS, SkinnyLaunch, dot_precision, tile_extent
from ..triton_kernels.levels import levels_kernel, widen_levels_kernel
from ..triton_kernels.levels_launch import (
    TILE_ROWS,
    WIDENED_ROWS,
    invariant_launch,
    levels_launch,
)
from .layers import over_rows
from .packed_levels import PackedLevels
from .tuned_linear import HALVES, Choices, none_chosen

# Outputs that a program makes whole.
WIDE_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class LevelsShape:
    """What launches are measured for; `zeros` tells whether zero points are read."""

    outputs: int
    inputs: int
    bits: int
    group: int
    run: int
    zeros: bool


@dataclass(slots=True)
class TunedLevels:
    """All layers of one shape, and by the place of a number of rows in ROW_BOUNDS how they are
    computed; None: as the table has it."""

    layers: list["LevelsLinear"] = field(default_factory=list)
    chosen: Choices = field(default_factory=none_chosen)


@dataclass(frozen=True, slots=True)
class SharedState:
    """What layers have together."""

    scratch: Scratch
    dependent: DependentLaunches
    deterministic: bool


class LevelsProducts:
    """The layers that one set of operators has made, launched as `dependent` says. Their steps run
    one behind the other, as they share scratch memory. If `deterministic` a row's bits do not
    depend on the others."""

    def __init__(
        self, dependent: DependentLaunches | None = None, deterministic: bool = False
    ) -> None:
        self.shapes: dict[LevelsShape, TunedLevels] = {}
        self._shared = SharedState(Scratch(), dependent or DependentLaunches(), deterministic)

    def layer(self, packed: PackedLevels, bias: torch.Tensor | None) -> "LevelsLinear":
        run, zeros = packed.words.shape[-1], packed.zeros is not None
        shape = LevelsShape(packed.outputs, packed.inputs, packed.bits, packed.group, run, zeros)
        tuned = self.shapes.setdefault(shape, TunedLevels())
        made = LevelsLinear(packed, bias, tuned, self._shared)
        tuned.layers.append(made)
        return made


class LevelsLinear:
    def __init__(
        self,
        packed: PackedLevels,
        bias: torch.Tensor | None,
        tuned: TunedLevels,
        shared: SharedState,
    ) -> None:
        self._packed, self._bias, self._tuned = packed, bias, tuned
        self._scratch, self._dependent = shared.scratch, shared.dependent
        self._deterministic = shared.deterministic

    @property
    def weight_bytes(self) -> int:
        return self._packed.num_bytes

    @property
    def inputs(self) -> int:
        """Of a row of x."""
        order = self._packed.order
        return self._packed.inputs if order is None else int(order.max()) + 1

    @property
    def steps(self) -> int:
        """How many parts the inputs could be cut into."""
        return len(self._packed.words)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if rows > WIDENED_ROWS and not self._deterministic:
            return F.linear(self._ordered(x), self.whole(x.dtype), self._bias)
        return self.narrow(x, self._launch_for(rows, x.element_size()))

    def narrow(self, x: torch.Tensor, launch: SkinnyLaunch) -> torch.Tensor:
        """By weights that are widened on their way."""

        def run(output: torch.Tensor, rows: torch.Tensor) -> None:
            self._launch(output, rows, launch)

        return over_rows(self._ordered(x), self._packed.outputs, run)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [out, in] with its inputs in order, valid until any layer's next call."""
        packed, elements = self._packed, self._packed.outputs * self._packed.inputs
        device = packed.words.device
        room = self._scratch.take("whole", -(-elements * dtype.itemsize // 4), device)
        made = room.view(dtype)[:elements].view(packed.outputs, packed.inputs)
        grid = (-(-packed.outputs // WIDE_COLUMNS), len(packed.words))
        widen_levels_kernel[grid](
            made, packed.words, packed.scales, packed.zero_points, len(packed.words),
            packed.outputs,
            COLUMNS=WIDE_COLUMNS, num_warps=4, **levels_layout(packed), **self._dependent.small,
        )  # fmt: skip
        return made

    def _launch_for(self, rows: int, element_bytes: int) -> SkinnyLaunch:
        if self._deterministic:
            return invariant_launch(element_bytes)
        if rows <= ROW_BOUNDS[-1] and element_bytes == 2:
            chosen = self._tuned.chosen[bisect_left(ROW_BOUNDS, rows)]
            if chosen is not None:
                return chosen
        return levels_launch(element_bytes, rows, self._packed.outputs, self.steps)

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        order = self._packed.order
        return x if order is None else x.index_select(-1, order)

    def _launch(self, output: torch.Tensor, rows: torch.Tensor, launch: SkinnyLaunch) -> None:
        packed, count = self._packed, len(rows)
        height = TILE_ROWS if self._deterministic else min(TILE_ROWS, tile_extent(count))
        programs = -(-count // height) * -(-packed.outputs // launch.columns)
        partial, arrived = self._scratch.split(
            programs, launch.splits, launch.columns * height, rows.device
        )
        levels_kernel[(programs, launch.splits)](
            output, partial, arrived, rows, packed.words, packed.scales, packed.zero_points,
            self._bias, count, launch.splits, len(packed.words), packed.outputs, rows.stride(0),
            BIAS=self._bias is not None, SPLIT=launch.splits > 1,
            ROWS=height, COLUMNS=launch.columns, ASM=by_assembly(rows),
            EXACT=dot_precision(rows.element_size()), num_warps=launch.warps,
            num_stages=launch.stages, **levels_layout(packed), **self._dependent.product,
        )  # fmt: skip


def levels_layout(packed: PackedLevels) -> dict[str, int]:
    """What the kernels are compiled for."""
    return {
        "BITS": packed.bits,
        "GROUP": packed.group,
        "ZERO": packed.kernel_zero,
        "RUN": packed.words.shape[-1],
    }


def by_assembly(x: torch.Tensor) -> bool:
    """Whether weights become x's dtype two at a time; the interpreter knows no assembly."""
    return x.dtype in HALVES and x.device.type != "cpu"
