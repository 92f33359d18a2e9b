"""The fused decoder computed layer by layer, for steps that one native call does not support.

It uses the same packed weights, so it needs no more memory; it is slower, as each layer is a
separate call.
"""

from collections.abc import Sequence

import torch

from ...checkpoints.config import ModelConfig
from ...kernels.cpu.executor import PackedLinear
from ...layers.expert_weights import ExpertWeights, Names
from ...layers.layers import Linear, PlainLinear
from ...operators.cpu import NativeOps
from ..linear.native_linear import NativeLinear
from .decoder_weights import DecoderWeights, make_weights
from .fused_weights import FusedWeights


class GatedLinear:
    """Gate and up, which are packed interleaved by half panels, returned as gate before up."""

    def __init__(self, linear: NativeLinear, half: int, inner: int) -> None:
        self._linear, self._half, self._inner = linear, half, inner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        turns = self._linear(x)
        blocks = turns.shape[-1] // (2 * self._half)
        pairs = turns.view(*turns.shape[:-1], blocks, 2, self._half).transpose(-3, -2)
        whole = pairs.flatten(-2)[..., : self._inner]
        return whole.flatten(-2).contiguous()


class PackedLayers:
    """Gives `make_weights` layers of weights that are already packed."""

    def __init__(self, weights: FusedWeights, ops: NativeOps) -> None:
        self._weights, self._executor = weights, ops.executor

    def read(self, name: str) -> torch.Tensor:
        if name in self._weights.tensors:
            return self._weights.tensors[name]
        if name in self._weights.heads:
            keys, values = map(self._unpack_heads, self._weights.heads[name])
            return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
        return self._executor.unpack(self._weights.linears[name,], self._weights.dtype)

    def _unpack_heads(self, heads: Sequence[PackedLinear]) -> torch.Tensor:
        """The weights [heads, out, in] of layers that keep the type of the others: their products
        with unit vectors are exact."""
        dtype = self._weights.dtype
        units = torch.eye(heads[0].inputs, dtype=dtype)
        rows = [self._executor.linear(head, units).T for head in heads]
        return torch.stack(rows).to(dtype)

    def read_float32(self, name: str) -> torch.Tensor:
        return self._weights.tensors[name].float()

    def make(
        self, weights: tuple[str, ...], biases: tuple[str, ...] = (), exact: bool = False
    ) -> Linear:
        """Biases, and the choice of `exact` layers, are already in the packed weights."""
        packed = self._weights.linears.get(weights)
        if packed is None:
            return PlainLinear(self.read(weights[0]), None)
        linear = NativeLinear(self._executor, packed)
        if "gate_proj" not in weights[0]:
            return linear
        inner = self._weights.linears[(weights[0].replace("gate_proj", "down_proj"),)].inputs
        return GatedLinear(linear, self._executor.padded(1) // 2, inner)

    def experts(self, experts: Sequence[tuple[Names, Names]]) -> ExpertWeights | None:
        """Returns None: experts are packed one by one."""
        return None


def layered_weights(config: ModelConfig, weights: FusedWeights, ops: NativeOps) -> DecoderWeights:
    """The layers of a decoder over `weights` that computes the same as the native call."""
    layers = PackedLayers(weights, ops)
    return make_weights(config, layers, layers, ops)
