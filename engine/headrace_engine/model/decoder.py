"""The native decoder: all families of `architectures` as one model with a few switches.

Fused products for QKV and for gate and up; logits only for the rows that sample, and behind the
last layer's attention only those rows are computed at all.
"""

from collections.abc import Sequence as Rows

import torch
from torch.nn import functional as F

from ..attention.base import AttentionBackend, AttentionMetadata, LayerCache, LayerParams
from ..lora.batch import LayerLoRA
from ..lora.shapes import LayerShapes, lora_shapes
from ..triton_kernels.dependent import DependentLaunches
from .base import ForwardBatch, KVShape
from .config import ModelConfig
from .decoder_weights import DecoderLayer, DecoderWeights
from .ops import DependentOps, HeadShape, Ops, QKNorm, WideOps, soft_cap
from .positions import LayerPositions, PositionTables
from .qkv import QKVAttention, QKVRows


class Decoder:
    """Residual blocks with a gated MLP."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        positions: PositionTables,
        ops: Ops,
        attention: AttentionBackend,
    ) -> None:
        self._ops: Ops = ops
        self._dependent = ops.dependent if isinstance(ops, DependentOps) else None
        self._config, self._attention = config, attention
        self._qkv_attention = attention if isinstance(attention, QKVAttention) else None
        self._positions = positions
        self._heads = HeadShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            config.interleaved,
        )
        self._embedding, self._layers = weights.embedding, weights.layers
        self._norm, self._lm_head = weights.norm, weights.lm_head
        self._embedding_scale = config.embedding_scale
        if config.rounds_embedding_scale:
            self._embedding_scale = _rounded(config.embedding_scale, self._embedding.dtype)
        if self._norm.dtype is not self._embedding.dtype:
            self._ops = WideOps(ops)

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        shape = KVShape(self._config.num_kv_heads, self._config.head_dim)
        return (shape,) * self._config.num_layers

    @property
    def heads(self) -> HeadShape:
        """Of each layer, as far as they are here."""
        return self._heads

    @property
    def layer_params(self) -> LayerParams:
        """Of the first layer's attention."""
        return self._layers[0].params

    @property
    def dependent(self) -> DependentLaunches | None:
        """How its operators' kernels are launched; None: they have no say in it."""
        return self._dependent

    @property
    def can_be_recorded(self) -> bool:
        """Whether a step asks the device nothing while it runs."""
        return all(layer.mlp.can_be_recorded for layer in self._layers)

    @property
    def lora_shapes(self) -> tuple[LayerShapes, ...]:
        return lora_shapes(self._config)

    def forward(self, batch: ForwardBatch, caches: Rows[LayerCache]) -> torch.Tensor:
        lora, positions = batch.lora, self._positions.lookup(batch.positions)
        residual, every = self._embed(batch.input_ids), samples_every_row(batch)
        hidden = self._normed(residual, self._layers[0].input_norm)
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            adapted = None if lora is None else lora.of_tokens(index)
            where = batch.metadata_of(index)
            attended = self._attend(layer, hidden, positions[index], cache, where, adapted)
            last = index + 1 == len(self._layers)
            if last and not every:
                attended = attended.index_select(0, batch.logits_rows)
                residual = residual.index_select(0, batch.logits_rows)
            if last:
                adapted = None if lora is None else lora.of_logits(index)
            output = self._project(layer, attended, adapted)
            output = self._normed(output, layer.attention_output_norm)
            hidden, residual = self._add_normed(output, residual, layer.mlp_norm)
            slots = batch.metadata.slots if every or not last else None
            output = layer.mlp(hidden, adapted, slots)
            output = self._normed(output, layer.mlp_output_norm)
            norm = self._norm if last else self._layers[index + 1].input_norm
            hidden, residual = self._add_normed(output, residual, norm)
        return self._finished(self._lm_head(hidden))

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        """What is done to logits behind the head."""
        divisor = self._config.logits_divisor
        scaled = logits if divisor is None else logits / divisor
        return soft_cap(scaled, self._config.logits_softcap)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self._lookup(ids)
        return embedded if self._embedding_scale is None else embedded * self._embedding_scale

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._embedding)

    def _project(
        self, layer: DecoderLayer, attended: torch.Tensor, lora: LayerLoRA | None
    ) -> torch.Tensor:
        output = layer.o(attended)
        if lora is not None:
            lora.add("o", attended, output)
        return output

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self._config.rms_norm_eps)

    def _add_normed(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if weight is None:
            total = residual + x
            return total, total
        return self._ops.add_rms_norm(x, residual, weight, self._config.rms_norm_eps)

    def _norm_rows(self, qkv: torch.Tensor, norm: QKNorm) -> torch.Tensor:
        """With queries and keys normalised over all their heads."""
        query, key, value = torch.split(qkv, list(self._heads.sizes), dim=-1)
        normed = (self._normed(query, norm.query), self._normed(key, norm.key))
        return torch.cat((*normed, value), dim=-1)

    def _attend(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        at: LayerPositions,
        cache: LayerCache,
        metadata: AttentionMetadata,
        lora: LayerLoRA | None,
    ) -> torch.Tensor:
        qkv = layer.qkv(hidden)
        if lora is not None:
            lora.add("qkv", hidden, qkv)
        return self._attend_qkv(layer, qkv, at, cache, metadata)

    def _attend_qkv(
        self,
        layer: DecoderLayer,
        qkv: torch.Tensor,
        at: LayerPositions,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        if layer.wide_qk_norm is not None:
            qkv = self._norm_rows(qkv, layer.wide_qk_norm)
        if at.query_scale is not None:
            qkv[:, : self._heads.sizes[0]] *= at.query_scale
        rows = QKVRows(qkv, at.cos, at.sin, self._heads, layer.qk_norm)
        if self._qkv_attention is not None:
            attended = self._qkv_attention.forward_qkv(rows, cache, metadata, layer.params)
            return attended.reshape(attended.shape[0], -1)
        query, key, value = self._ops.rotate_qkv(
            rows.qkv, rows.cos, rows.sin, rows.shape, rows.norm
        )
        attended = self._attention.forward(query, key, value, cache, metadata, layer.params)
        return attended.reshape(attended.shape[0], -1)


def _rounded(scale: float | None, dtype: torch.dtype) -> float | None:
    """To the weights' dtype, as the models were trained; on the host, as no step may wait."""
    return None if scale is None else float(torch.tensor(scale, dtype=dtype))


def samples_every_row(batch: ForwardBatch) -> bool:
    """Whether it is a decode of all sequences: their rows are asked for in their order."""
    count = len(batch.logits_rows)
    return batch.metadata.num_decodes == len(batch.input_ids) == count
