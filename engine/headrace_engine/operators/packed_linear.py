"""Linear layers with packed int4 or int8 weights, on CUDA devices through Triton.

For few rows, the kernel unpacks weights while it multiplies. For many rows, the whole matrix is
unpacked, into memory that all layers share, and cuBLAS multiplies it.
"""

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..device.scratch import Scratch
from ..kernels.triton.dependent_launch import DependentLaunches
from ..kernels.triton.launch import ROW_BOUNDS, SmallBatchLaunch, dot_precision, tile_extent
from ..kernels.triton.packed import dequantize_packed_kernel, packed_linear_kernel
from ..kernels.triton.packed_launch import (
    DEQUANTIZED_ROWS,
    TILE_ROWS,
    batch_invariant_launch,
    packed_linear_launch,
)
from ..layers.layers import over_rows
from ..layers.packed_weights import PackedWeight
from .tuned_linear import HALVES, TunedLayers

# Outputs that one program unpacks.
WIDE_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class PackedShape:
    """The shape for which launches are measured; `zeros` says whether zero points are read."""

    outputs: int
    inputs: int
    bits: int
    group: int
    run: int
    zeros: bool


class PackedProducts:
    """The layers that one set of operators has made.

    `dependent_launches` has their options for programmatic dependent launch. They share scratch
    memory, so their steps must not overlap. With `deterministic` a row's bits do not depend on the
    other rows.
    """

    def __init__(
        self, dependent_launches: DependentLaunches | None = None, deterministic: bool = False
    ) -> None:
        self.shapes: dict[PackedShape, TunedLayers[PackedWeightLinear]] = {}
        self.dependent_launches, self.scratch = dependent_launches or DependentLaunches(), Scratch()
        self.deterministic = deterministic

    def layer(self, packed: PackedWeight, bias: torch.Tensor | None) -> "PackedWeightLinear":
        run, zeros = packed.words.shape[-1], packed.zeros is not None
        shape = PackedShape(packed.outputs, packed.inputs, packed.bits, packed.group, run, zeros)
        tuned = self.shapes.setdefault(shape, TunedLayers())
        made = PackedWeightLinear(packed, bias, tuned, self)
        tuned.layers.append(made)
        return made


class PackedWeightLinear:
    """A linear layer with a packed weight; its launch is the measured one or the table's."""

    def __init__(
        self,
        packed: PackedWeight,
        bias: torch.Tensor | None,
        tuned: TunedLayers["PackedWeightLinear"],
        products: PackedProducts,
    ) -> None:
        self._packed, self._bias, self._tuned = packed, bias, tuned
        self._scratch, self._dependent_launches = products.scratch, products.dependent_launches
        self._deterministic = products.deterministic

    @property
    def weight_bytes(self) -> int:
        return self._packed.num_bytes

    @property
    def inputs(self) -> int:
        """Number of elements of a row of x."""
        order = self._packed.order
        return self._packed.inputs if order is None else int(order.max()) + 1

    @property
    def steps(self) -> int:
        """The largest number of parts into which the inputs can be split."""
        return len(self._packed.words)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if rows > DEQUANTIZED_ROWS and not self._deterministic:
            return F.linear(self._ordered(x), self.unpacked(x.dtype), self._bias)
        return self.small_batch(x, self._launch_for(rows, x.element_size()))

    def small_batch(self, x: torch.Tensor, launch: SmallBatchLaunch) -> torch.Tensor:
        """Multiplies in one kernel, which unpacks the weights too."""

        def run(output: torch.Tensor, rows: torch.Tensor) -> None:
            self._launch(output, rows, launch)

        return over_rows(self._ordered(x), self._packed.outputs, run)

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The unpacked weight [out, in] with inputs in the original order; valid until any layer's
        next call."""
        packed, elements = self._packed, self._packed.outputs * self._packed.inputs
        device = packed.words.device
        room = self._scratch.take("whole", -(-elements * dtype.itemsize // 4), device)
        made = room.view(dtype)[:elements].view(packed.outputs, packed.inputs)
        grid = (-(-packed.outputs // WIDE_COLUMNS), len(packed.words))
        dequantize_packed_kernel[grid](
            made, packed.words, packed.scales, packed.zero_points, len(packed.words),
            packed.outputs, COLUMNS=WIDE_COLUMNS, num_warps=4,
            **packed_layout(packed), **self._dependent_launches.small,
        )  # fmt: skip
        return made

    def _launch_for(self, rows: int, element_bytes: int) -> SmallBatchLaunch:
        if self._deterministic:
            return batch_invariant_launch(element_bytes)
        if rows <= ROW_BOUNDS[-1] and element_bytes == 2:
            chosen = self._tuned.chosen[bisect_left(ROW_BOUNDS, rows)]
            if isinstance(chosen, SmallBatchLaunch):
                return chosen
        return packed_linear_launch(element_bytes, rows, self._packed.outputs, self.steps)

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        order = self._packed.order
        return x if order is None else x.index_select(-1, order)

    def _launch(self, output: torch.Tensor, rows: torch.Tensor, launch: SmallBatchLaunch) -> None:
        packed, count = self._packed, len(rows)
        height = TILE_ROWS if self._deterministic else min(TILE_ROWS, tile_extent(count))
        programs = -(-count // height) * -(-packed.outputs // launch.columns)
        partial, arrived = self._scratch.split(
            programs, launch.splits, launch.columns * height, rows.device
        )
        packed_linear_kernel[(programs, launch.splits)](
            output, partial, arrived, rows, packed.words, packed.scales, packed.zero_points,
            self._bias, count, launch.splits, len(packed.words), packed.outputs, rows.stride(0),
            BIAS=self._bias is not None, SPLIT=launch.splits > 1,
            ROWS=height, COLUMNS=launch.columns, ASM=by_assembly(rows),
            EXACT=dot_precision(rows.element_size()), num_warps=launch.warps,
            num_stages=launch.stages, **packed_layout(packed), **self._dependent_launches.product,
        )  # fmt: skip


def packed_layout(packed: PackedWeight) -> dict[str, int]:
    """Compile-time constants of the kernels."""
    return {
        "BITS": packed.bits,
        "GROUP": packed.group,
        "ZERO": packed.kernel_zero,
        "RUN": packed.words.shape[-1],
    }


def by_assembly(x: torch.Tensor) -> bool:
    """Whether inline assembly converts two weights at a time to x's dtype; the interpreter has
    none."""
    return x.dtype in HALVES and x.device.type != "cpu"
