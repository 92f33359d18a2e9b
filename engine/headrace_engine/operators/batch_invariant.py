"""Operators for CUDA devices that give a row the same bits in any batch.

The element-wise kernels do so in any case, as each row has its own program; linear layers use one
tile size for every number of rows. `determinism` refuses models that need other kernels.
"""

import torch

from ..kernels.triton.launch import dot_precision, linear_launch
from ..kernels.triton.linear import linear_kernel
from ..layers.expert_weights import MixtureParts
from ..layers.feed_forward import FeedForward
from ..layers.layers import Linear, over_rows
from ..lora.batch import LoRALimits, LoRAProducts, Move
from ..lora.tiles import TiledProducts
from .packed_linear import PackedProducts
from .triton import TritonOps
from .triton_experts import GroupedMoe


class BatchInvariantLinear:
    """A dense linear layer, weight [out, in], with one launch for every number of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return over_rows(x, len(self._weight), self._launch)

    def _launch(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        launch = linear_launch(rows.element_size())
        outputs, inputs = self._weight.shape
        tiles = -(-len(rows) // launch.rows) * -(-outputs // launch.columns)
        linear_kernel[(tiles,)](
            output, rows, self._weight, None, self._bias, len(rows), rows.stride(0), 0,
            INPUTS=inputs, OUTPUTS=outputs, BIAS=self._bias is not None,
            ROWS=launch.rows, COLUMNS=launch.columns, DEPTH=launch.depth,
            EXACT=dot_precision(rows.element_size()), SCALED=False, GROUP=0, BITS=False,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip


class BatchInvariantOps(TritonOps):
    """Triton operators whose results for a row do not depend on the other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = PackedProducts(self.dependent_launches, deterministic=True)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return BatchInvariantLinear(weight, bias)

    def mixture(self, parts: MixtureParts) -> FeedForward:
        return GroupedMoe(parts, deterministic=True)

    def lora_products(self, limits: LoRALimits, move: Move) -> LoRAProducts:
        return TiledProducts(limits, move, deterministic=True)
