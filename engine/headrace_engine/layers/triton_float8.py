"""8-bit floats on CUDA devices through Triton: rounding of rows, and products that convert matrices
tile by tile."""

import torch

from ..kernels.triton.fp8 import round_rows_kernel
from ..kernels.triton.launch import (
    dot_precision,
    linear_launch,
    power_of_two,
    row_warps,
    tile_extent,
)
from ..kernels.triton.linear import linear_kernel
from .float8_weight import FLOAT8, LARGEST, SMALLEST, Float8Weight
from .fp8_cache import storage
from .layers import over_rows

# The most inputs that a program takes at a time, all of one group.
DEPTH = 64


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Like float8_weight.round_rows, in one launch; for devices with e4m3 instructions."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = x.shape
    values = torch.empty(rows, width, dtype=FLOAT8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    round_rows_kernel[(rows,)](
        values, scales, x, x.stride(0), WIDTH=width, BLOCK=power_of_two(width),
        LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=row_warps(width),
    )  # fmt: skip
    return values, scales


def takes(weight: Float8Weight) -> bool:
    """Whether scales change only between a program's steps over the inputs."""
    return weight.scales.shape[1] == 1 or weight.group % DEPTH == 0


class WeightOnlyFloat8Linear:
    """A layer with weights that `takes` accepts; activations keep their dtype."""

    def __init__(
        self,
        weight: Float8Weight,
        bias: torch.Tensor | None,
        device: torch.device,
        capability: tuple[int, int],
    ) -> None:
        self._stored = storage(FLOAT8, capability)
        (self._weight,) = self._stored.views([weight.values.contiguous().to(device)])
        self._scales = weight.scales.contiguous().to(device)
        self._bias = bias
        self._group = weight.own_group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return over_rows(x, len(self._weight), self._launch)

    def _launch(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        launch = linear_launch(rows.element_size())
        outputs, inputs = self._weight.shape
        height = min(launch.rows, tile_extent(len(rows)))
        tiles = -(-len(rows) // height) * -(-outputs // launch.columns)
        linear_kernel[(tiles,)](
            output, rows, self._weight, self._scales, self._bias, len(rows), rows.stride(0),
            self._scales.stride(0), INPUTS=inputs, OUTPUTS=outputs,
            BIAS=self._bias is not None, ROWS=height, COLUMNS=launch.columns,
            DEPTH=min(DEPTH, launch.depth), EXACT=dot_precision(rows.element_size()),
            SCALED=True, GROUP=self._group, BITS=self._stored.as_bytes,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
