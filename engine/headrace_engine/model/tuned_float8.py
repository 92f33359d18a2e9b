"""Linear layers with weights in 8-bit floats on CUDA devices: few rows by the kernel that widens
weights on their way, where that was measured to be faster or nothing else cuts the inputs; else as
`float8_linear` has them. What was measured comes from outside (`tuning`).
"""

from bisect import bisect_left
from dataclasses import dataclass, field, replace

import torch

from ..attention.fp8 import storage
from ..attention.scratch import Scratch
from ..triton_kernels.dependent import DependentLaunches
from ..triton_kernels.launch import ROW_BOUNDS, SkinnyLaunch, float8_candidates, tile_extent
from ..triton_kernels.skinny_float8 import skinny_float8_kernel
from .float8_linear import ScaledLinear, make_float8
from .layers import Linear, over_rows
from .quantization.float8_weight import FLOAT8, Float8Weight
from .tuned_linear import HALVES, Choices, none_chosen


@dataclass(frozen=True, slots=True)
class Float8Shape:
    """`group` inputs have a scale of their own; 0: all of an output have one. With `scaled` rows
    may be rounded, for a product of 8-bit floats."""

    outputs: int
    inputs: int
    group: int
    scaled: bool

    @property
    def candidates(self) -> list[SkinnyLaunch]:
        return float8_candidates(self.inputs, self.outputs, self.group)


@dataclass(slots=True)
class TunedFloat8:
    """All layers of one shape, and how few rows are computed, by their place in ROW_BOUNDS; None:
    as many are."""

    layers: list["Float8Linear"] = field(default_factory=list)
    choices: Choices = field(default_factory=none_chosen)


class Float8Products:
    """The layers that one set of operators has made, launched as `dependent` says. Their steps run
    one behind the other, as they share scratch memory."""

    def __init__(self, dependent: DependentLaunches | None = None) -> None:
        self.shapes: dict[Float8Shape, TunedFloat8] = {}
        self.dependent, self.scratch = dependent or DependentLaunches(), Scratch()

    def layer(
        self,
        weight: Float8Weight,
        bias: torch.Tensor | None,
        device: torch.device,
        capability: tuple[int, int],
    ) -> Linear | None:
        """None for sizes that there is no way for."""
        values, scales = (one.contiguous().to(device) for one in (weight.values, weight.scales))
        placed = replace(weight, values=values, scales=scales)
        many = make_float8(placed, bias, device, capability)
        if many is None:
            return None
        shape = Float8Shape(*weight.shape, weight.own_group, isinstance(many, ScaledLinear))
        if not shape.candidates:
            return many
        tuned = self.shapes.setdefault(shape, TunedFloat8(choices=_defaults(shape)))
        made = Float8Linear(placed, bias, many, tuned, self, capability)
        tuned.layers.append(made)
        return made


def _defaults(shape: Float8Shape) -> Choices:
    """Unmeasured: what rounds rows cuts inputs itself."""
    return none_chosen() if shape.scaled else [shape.candidates[0]] * len(ROW_BOUNDS)


class Float8Linear:
    """`many` computes any number of rows."""

    def __init__(
        self,
        weight: Float8Weight,
        bias: torch.Tensor | None,
        many: Linear,
        tuned: TunedFloat8,
        products: Float8Products,
        capability: tuple[int, int],
    ) -> None:
        self._stored = storage(FLOAT8, capability)
        (self._weight,) = self._stored.views([weight.values])
        self._scales, self._bias = weight.scales, bias
        self._group = weight.own_group
        self.many, self._tuned = many, tuned
        self._dependent, self._scratch = products.dependent, products.scratch

    @property
    def weight_bytes(self) -> int:
        return self._weight.numel() + 4 * self._scales.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        few = 0 < rows <= ROW_BOUNDS[-1] and x.dtype in HALVES
        launch = self._tuned.choices[bisect_left(ROW_BOUNDS, rows)] if few else None
        return self.many(x) if launch is None else self.few(x, launch)

    def few(self, x: torch.Tensor, launch: SkinnyLaunch) -> torch.Tensor:
        """For up to 64 rows of 2 bytes an element."""

        def run(output: torch.Tensor, rows: torch.Tensor) -> None:
            self._launch(output, rows, launch)

        return over_rows(x, len(self._weight), run)

    def _launch(self, output: torch.Tensor, rows: torch.Tensor, launch: SkinnyLaunch) -> None:
        outputs, inputs = self._weight.shape
        height, tiles = tile_extent(len(rows)), -(-outputs // launch.columns)
        partial, arrived = self._scratch.split(
            tiles, launch.splits, launch.columns * height, rows.device
        )
        ahead = self._dependent.prefetched(outputs * launch.splits, inputs // launch.splits)
        skinny_float8_kernel[(tiles, launch.splits)](
            output, partial, arrived, rows, self._weight, self._scales, self._bias, len(rows),
            launch.splits, inputs, outputs, rows.stride(0), self._scales.stride(0), ahead,
            BIAS=self._bias is not None, SPLIT=launch.splits > 1, GROUP=self._group,
            BITS=self._stored.bits, ROWS=height, COLUMNS=launch.columns, DEPTH=launch.depth,
            **self._dependent.product, LINES=self._dependent.lines,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
