"""Operators for CUDA devices whose bits for a row are the same whatever other rows there are.

The element-wise kernels are so anyway, a program for each row; linear layers get one tile for all
numbers of rows. What has no such kernel is refused when the model is loaded, see `determinism`.
"""

import torch

from ..lora.batch import LoRALimits, LoRAProducts, Move
from ..lora.tiles import TiledProducts
from ..triton_kernels.launch import dot_precision, linear_launch
from ..triton_kernels.linear import linear_kernel
from .expert_weights import MixtureParts
from .feed_forward import FeedForward
from .layers import Linear, over_rows
from .levels_linear import LevelsProducts
from .triton_experts import GroupedMoe
from .triton_ops import TritonOps


class InvariantLinear:
    """weight [out, in], dense, of a dtype that Triton's products take."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return over_rows(x, len(self._weight), self._launch)

    def _launch(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        launch = linear_launch(rows.element_size())
        outputs, inputs = self._weight.shape
        tiles = -(-len(rows) // launch.rows) * -(-outputs // launch.columns)
        linear_kernel[(tiles,)](
            output, rows, self._weight, self._bias, len(rows), rows.stride(0),
            INPUTS=inputs, OUTPUTS=outputs, BIAS=self._bias is not None,
            ROWS=launch.rows, COLUMNS=launch.columns, DEPTH=launch.depth,
            EXACT=dot_precision(rows.element_size()),
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip


class InvariantOps(TritonOps):
    def __init__(self) -> None:
        super().__init__()
        self.levels = LevelsProducts(self.dependent, deterministic=True)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return InvariantLinear(weight, bias)

    def mixture(self, parts: MixtureParts) -> FeedForward:
        return GroupedMoe(parts, deterministic=True)

    def lora_products(self, limits: LoRALimits, move: Move) -> LoRAProducts:
        return TiledProducts(limits, move, deterministic=True)
