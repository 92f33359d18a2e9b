"""The decoder of one native call, layer by layer: what it cannot do in one call is done so.

From the same packed weights, so that it costs no memory; slower, as each layer is a call of its
own.
"""

from collections.abc import Sequence as Rows

import torch

from ..kernels.ops import NativeOps
from .config import ModelConfig
from .decoder_weights import DecoderWeights, make_weights
from .expert_weights import ExpertWeights, Names
from .fused_weights import FusedWeights
from .layers import Linear, PlainLinear
from .linear_maker import NativeLinear


class GatedLinear:
    """Gate and up, which are packed in turns of half a panel, as gate before up."""

    def __init__(self, linear: NativeLinear, half: int, inner: int) -> None:
        self._linear, self._half, self._inner = linear, half, inner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        turns = self._linear(x)
        blocks = turns.shape[-1] // (2 * self._half)
        pairs = turns.view(*turns.shape[:-1], blocks, 2, self._half).transpose(-3, -2)
        whole = pairs.flatten(-2)[..., : self._inner]
        return whole.flatten(-2).contiguous()


class PackedLayers:
    """What `make_weights` asks for, out of weights that are packed already."""

    def __init__(self, weights: FusedWeights, ops: NativeOps) -> None:
        self._weights, self._executor = weights, ops.executor

    def read(self, name: str) -> torch.Tensor:
        return self._weights.tensors[name]

    def make(
        self, weights: tuple[str, ...], biases: tuple[str, ...] = (), exact: bool = False
    ) -> Linear:
        """Biases are packed with the weights, and so is what `exact` asks for."""
        packed = self._weights.linears.get(weights)
        if packed is None:
            return PlainLinear(self.read(weights[0]), None)
        linear = NativeLinear(self._executor, packed)
        if "gate_proj" not in weights[0]:
            return linear
        inner = self._weights.linears[(weights[0].replace("gate_proj", "down_proj"),)].inputs
        return GatedLinear(linear, self._executor.padded(1) // 2, inner)

    def experts(self, experts: Rows[tuple[Names, Names]]) -> ExpertWeights | None:
        """They are packed one by one."""
        return None


def layered_weights(config: ModelConfig, weights: FusedWeights, ops: NativeOps) -> DecoderWeights:
    """For a decoder over `weights`, which computes what the native call does."""
    layers = PackedLayers(weights, ops)
    return make_weights(config, layers, layers, ops)
