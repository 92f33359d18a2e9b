"""A decoder that fuses norms into the products before and after them: two launches a layer less. It
does so only in steps that ask for it (`DependentLaunches.fused_norms`); all other steps are those
of Decoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch

from ...checkpoints.config import ModelConfig
from ...core.attention_backend import AttentionBackend, LayerCache
from ...kernels.triton.launch import ROW_BOUNDS
from ...layers.feed_forward import GatedMLP
from ...layers.layers import Linear
from ...operators.base import Ops
from ...operators.triton import TritonOps
from ...operators.tuned_linear import TunedLinear
from ..base import ForwardBatch
from .decoder import Decoder, samples_every_row
from .decoder_weights import DecoderLayer, DecoderWeights
from .positions import PositionTables


@dataclass(frozen=True, slots=True)
class _Block:
    """The part of a layer after its attention; `norm` and `following` are the next layer's first
    norm and product, or the last norm and the head."""

    layer: DecoderLayer
    mlp_norm: torch.Tensor
    o: TunedLinear
    gate_up: TunedLinear
    down: TunedLinear
    norm: torch.Tensor
    following: TunedLinear


def make_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    positions: PositionTables,
    ops: Ops,
    attention: AttentionBackend,
) -> Decoder:
    """Makes a decoder that can fuse norms, if all its norms can be fused; otherwise a Decoder."""
    blocks = _blocks(weights)
    if blocks is None or not isinstance(ops, TritonOps):
        return Decoder(config, weights, positions, ops, attention)
    return NormFusingDecoder(config, weights, positions, ops, attention, blocks=blocks)


class NormFusingDecoder(Decoder):
    """A Decoder that can compute a step with fused norms."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        positions: PositionTables,
        ops: TritonOps,
        attention: AttentionBackend,
        *,
        blocks: Sequence[_Block],
    ) -> None:
        super().__init__(config, weights, positions, ops, attention)
        self._blocks, self._launches = blocks, ops.dependent_launches

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        if self._launches.fused_norms and self._can_fuse(batch):
            return self._forward_fused(batch, caches)
        return super().forward(batch, caches)

    def _can_fuse(self, batch: ForwardBatch) -> bool:
        few = 0 < len(batch.input_ids) <= ROW_BOUNDS[-1]
        plain = batch.lora is None and batch.vision is None
        return few and plain and samples_every_row(batch)

    def _forward_fused(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        eps = self._config.rms_norm_eps
        positions = self._positions.lookup(batch.positions)
        residual, first = self._embed(batch.input_ids), self._layers[0]
        qkv = first.qkv(self._normed(residual, first.input_norm))
        layers = zip(self._blocks, positions, caches, strict=True)
        for index, (block, at, cache) in enumerate(layers):
            where = batch.metadata_of(index)
            # No fusible layer reads its input again: the residual stream only stands in for it.
            attended = self._attend_qkv(block.layer, residual, qkv, at, cache, where)
            normed = block.o.linear_add_norm(attended, residual, block.mlp_norm, eps)
            inner = block.gate_up.norm_linear_silu(normed)
            normed = block.down.linear_add_norm(inner, residual, block.norm, eps)
            qkv = block.following.norm_linear(normed)
        return self._finished(qkv)


def _blocks(weights: DecoderWeights) -> list[_Block] | None:
    """The fusible parts of all layers; None if some norm is not between two products that support
    it."""
    layers = weights.layers
    following = [(layer.input_norm, layer.qkv) for layer in layers[1:]]
    following.append((weights.norm, weights.lm_head))
    blocks = [_block(layer, *after) for layer, after in zip(layers, following, strict=True)]
    made = [block for block in blocks if block is not None]
    return made if len(made) == len(blocks) else None


def _block(layer: DecoderLayer, norm: torch.Tensor | None, following: Linear) -> _Block | None:
    mlp, o, mlp_norm = layer.mlp, layer.o, layer.mlp_norm
    if layer.attention_output_norm is not None or layer.mlp_output_norm is not None:
        return None
    if layer.latent is not None and layer.latent.index is not None:  # reads the norm's result
        return None
    if layer.shortcut is not None:
        return None
    if mlp_norm is None or norm is None or not mlp_norm.dtype is norm.dtype is torch.bfloat16:
        return None
    if not isinstance(mlp, GatedMLP) or mlp.activated is None:
        return None
    gate_up, down = mlp.gate_up, mlp.down
    if not (_takes(o) and _takes(gate_up, gated=True) and _takes(down) and _takes(following)):
        return None
    return _Block(layer, mlp_norm, o, gate_up, down, norm, following)


def _takes(linear: Linear, gated: bool = False) -> TypeGuard[TunedLinear]:
    return isinstance(linear, TunedLinear) and linear.can_fuse_norms(gated)
