"""A decoder whose norms can be parts of the products before and behind them: two launches a layer
less. Only in steps whose kernels are to be launched so (`DependentLaunches.fused_norms`); all
others are a Decoder's.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TypeGuard

import torch

from ..attention.base import AttentionBackend, LayerCache
from ..triton_kernels.launch import ROW_BOUNDS
from .base import ForwardBatch
from .config import ModelConfig
from .decoder import Decoder, samples_every_row
from .decoder_weights import DecoderLayer, DecoderWeights
from .feed_forward import GatedMLP
from .layers import Linear
from .ops import Ops
from .positions import PositionTables
from .triton_ops import TritonOps
from .tuned_linear import TunedLinear


@dataclass(frozen=True, slots=True)
class _Block:
    """Behind a layer's attention; `norm` and `behind` are the next layer's, or the last norm and
    the head."""

    layer: DecoderLayer
    mlp_norm: torch.Tensor
    o: TunedLinear
    gate_up: TunedLinear
    down: TunedLinear
    norm: torch.Tensor
    behind: TunedLinear


def make_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    positions: PositionTables,
    ops: Ops,
    attention: AttentionBackend,
) -> Decoder:
    """One that can fuse norms, where all of them can be."""
    blocks = _blocks(weights)
    if blocks is None or not isinstance(ops, TritonOps):
        return Decoder(config, weights, positions, ops, attention)
    return NormFusingDecoder(config, weights, positions, ops, attention, blocks=blocks)


class NormFusingDecoder(Decoder):
    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        positions: PositionTables,
        ops: TritonOps,
        attention: AttentionBackend,
        *,
        blocks: Rows[_Block],
    ) -> None:
        super().__init__(config, weights, positions, ops, attention)
        self._blocks, self._launches = blocks, ops.dependent

    def forward(self, batch: ForwardBatch, caches: Rows[LayerCache]) -> torch.Tensor:
        if self._launches.fused_norms and self._can_fuse(batch):
            return self._forward_fused(batch, caches)
        return super().forward(batch, caches)

    def _can_fuse(self, batch: ForwardBatch) -> bool:
        few = 0 < len(batch.input_ids) <= ROW_BOUNDS[-1]
        return few and batch.lora is None and samples_every_row(batch)

    def _forward_fused(self, batch: ForwardBatch, caches: Rows[LayerCache]) -> torch.Tensor:
        eps = self._config.rms_norm_eps
        positions = self._positions.lookup(batch.positions)
        residual, first = self._embed(batch.input_ids), self._layers[0]
        qkv = first.qkv(self._normed(residual, first.input_norm))
        layers = zip(self._blocks, positions, caches, strict=True)
        for index, (block, at, cache) in enumerate(layers):
            attended = self._attend_qkv(block.layer, qkv, at, cache, batch.metadata_of(index))
            normed = block.o.added(attended, residual, block.mlp_norm, eps)
            inner = block.gate_up.divided_activated(normed)
            normed = block.down.added(inner, residual, block.norm, eps)
            qkv = block.behind.divided(normed)
        return self._finished(qkv)


def _blocks(weights: DecoderWeights) -> list[_Block] | None:
    """None where some norm is not between two products that take it."""
    layers = weights.layers
    behind = [(layer.input_norm, layer.qkv) for layer in layers[1:]]
    behind.append((weights.norm, weights.lm_head))
    blocks = [_block(layer, *after) for layer, after in zip(layers, behind, strict=True)]
    made = [block for block in blocks if block is not None]
    return made if len(made) == len(blocks) else None


def _block(layer: DecoderLayer, norm: torch.Tensor | None, behind: Linear) -> _Block | None:
    mlp, o, mlp_norm = layer.mlp, layer.o, layer.mlp_norm
    if layer.attention_output_norm is not None or layer.mlp_output_norm is not None:
        return None
    if mlp_norm is None or norm is None or not mlp_norm.dtype is norm.dtype is torch.bfloat16:
        return None
    if not isinstance(mlp, GatedMLP) or mlp.activated is None:
        return None
    gate_up, down = mlp.gate_up, mlp.down
    if not (_takes(o) and _takes(gate_up, gated=True) and _takes(down) and _takes(behind)):
        return None
    return _Block(layer, mlp_norm, o, gate_up, down, norm, behind)


def _takes(linear: Linear, gated: bool = False) -> TypeGuard[TunedLinear]:
    return isinstance(linear, TunedLinear) and linear.takes_norms(gated)
