"""The native decoder: all families of `architectures` as one model with a few switches.

QKV, and gate and up, are fused products. Only rows that sample get logits, and after the last
layer's attention only those rows are computed.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ...attention.image_spans import attend_to_image
from ...checkpoints.config import ModelConfig
from ...core.attention_backend import (
    AttentionBackend,
    AttentionMetadata,
    LayerCache,
    LayerParams,
    latent_backend,
)
from ...lora.batch import LayerLoRA
from ...lora.shapes import LayerShapes, lora_shapes
from ...operators.base import DependentOps, Float32NormOps, HeadShape, Ops, QKNorm, soft_cap
from ...operators.qkv import QKVAttention, QKVRows
from ..base import ForwardBatch, VisionRows, kv_shapes
from .decoder_weights import DecoderLayer, DecoderWeights
from .latent import LatentAttention
from .positions import LayerPositions, PositionTables


class Decoder:
    """Residual blocks with attention and a gated MLP. `heads` are the first layer's in this
    process."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        positions: PositionTables,
        ops: Ops,
        attention: AttentionBackend,
    ) -> None:
        self._ops: Ops = ops
        self.dependent_launches = ops.dependent_launches if isinstance(ops, DependentOps) else None
        self._config, self._attention = config, attention
        self.vocab_size = config.vocab_size
        self.kv_shapes = kv_shapes(config)
        self._qkv_attention = attention if isinstance(attention, QKVAttention) else None
        self._latent_attention = _latent_attention(config, ops, attention)
        self._positions = positions
        self.heads = _head_shape(config, 0)
        # By the width of a layer's QKV rows.
        self._heads_by_width = {
            _row_width(config, layer): _head_shape(config, layer)
            for layer in range(config.num_layers)
        }
        self._embedding, self._layers = weights.embedding, weights.layers
        self._norm, self._lm_head = weights.norm, weights.lm_head
        self._embedding_scale = config.embedding_scale
        if config.rounds_embedding_scale:
            self._embedding_scale = _rounded(config.embedding_scale, self._embedding.dtype)
        if self._norm.dtype is not self._embedding.dtype:
            self._ops = Float32NormOps(ops)

    @property
    def layer_params(self) -> LayerParams:
        """The attention parameters of the first layer."""
        return self._layers[0].params

    @property
    def embedding(self) -> torch.Tensor:
        return self._embedding

    @property
    def can_be_recorded(self) -> bool:
        """Whether a step never waits for the device."""
        if self._config.latent is not None and self._config.latent.index is not None:
            return False
        parts = [part for layer in self._layers for part in (layer.mlp, layer.shortcut)]
        return all(part is None or part.can_be_recorded for part in parts)

    @property
    def lora_shapes(self) -> tuple[LayerShapes, ...]:
        return lora_shapes(self._config)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        residual = self._embed(batch.input_ids)
        if batch.vision is not None:
            embeddings = batch.vision.embeddings[0].to(residual.dtype)
            residual.index_copy_(0, batch.vision.rows, embeddings)
        hidden = self._normed(residual, self._layers[0].input_norm)
        hidden, _ = self._run(hidden, residual, batch, caches)
        return self._finished(self._lm_head(hidden))

    def _run(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        batch: ForwardBatch,
        caches: Sequence[LayerCache],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the layers on the first layer's input `hidden` and the residual stream. Returns the
        rows that sample, after the last norm and before it."""
        lora, vision = batch.lora, batch.vision
        positions = self._positions.lookup(batch.positions, vision)
        every = samples_every_row(batch)
        shortcut: torch.Tensor | None = None
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            self._before_layer(index, residual)
            adapted = None if lora is None else lora.of_tokens(index)
            where = batch.metadata_of(index)
            attended = self._attend(layer, hidden, positions[index], cache, where, adapted, vision)
            last = index + 1 == len(self._layers)
            if last and not every:
                attended = attended.index_select(0, batch.logits_rows)
                residual = residual.index_select(0, batch.logits_rows)
                if shortcut is not None:
                    shortcut = shortcut.index_select(0, batch.logits_rows)
            if last:
                adapted = None if lora is None else lora.of_logits(index)
            output = self._project(layer, attended, adapted)
            output = self._normed(output, layer.attention_output_norm)
            hidden, residual = self._add_normed(output, residual, layer.mlp_norm)
            slots = batch.metadata.slots if every or not last else None
            output = layer.mlp(hidden, adapted, slots)
            if shortcut is not None:
                output = output + shortcut
            shortcut = None if layer.shortcut is None else layer.shortcut(hidden, None, slots)
            output = self._normed(output, layer.mlp_output_norm)
            if vision is not None and index + 1 < len(vision.embeddings):
                added = vision.embeddings[index + 1].to(output.dtype)
                output = output.index_add(0, vision.rows, added)
            norm = self._norm if last else self._layers[index + 1].input_norm
            hidden, residual = self._add_normed(output, residual, norm)
        return hidden, residual

    def _before_layer(self, index: int, residual: torch.Tensor) -> None:
        """Called with the residual stream that a layer reads, which the layer may overwrite."""

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        """Divides and caps the head's logits as the model requires."""
        return finish_logits(self._config, logits)

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
        """Normalises queries and keys, each over all heads together."""
        query, key, value = torch.split(qkv, list(self.heads.sizes), dim=-1)
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
        vision: VisionRows | None,
    ) -> torch.Tensor:
        qkv = layer.qkv(hidden)
        if lora is not None:
            lora.add("qkv", hidden, qkv)
        spans = () if vision is None else vision.spans
        # Attention may rotate the rows in place.
        queries = [self._rotated_query(layer, qkv, at, span.rows) for span in spans]
        attended = self._attend_qkv(layer, hidden, qkv, at, cache, metadata, lora)
        for span, query in zip(spans, queries, strict=True):
            blocks = metadata.block_tables[span.sequence]
            found = attend_to_image(self._attention, query, cache, blocks, layer.params, span.first)
            attended[span.rows] = found.flatten(1)
        return attended

    def _rotated_query(
        self, layer: DecoderLayer, qkv: torch.Tensor, at: LayerPositions, rows: slice
    ) -> torch.Tensor:
        """The queries [n, Hq, D] of some rows."""
        query, _, _ = self._ops.rotate_qkv(
            qkv[rows].clone(), at.cos[rows], at.sin[rows], self.heads, layer.qk_norm
        )
        return query

    def _attend_qkv(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        qkv: torch.Tensor,
        at: LayerPositions,
        cache: LayerCache,
        metadata: AttentionMetadata,
        lora: LayerLoRA | None = None,
    ) -> torch.Tensor:
        if self._latent_attention is not None and layer.latent is not None:
            return self._latent_attention(
                layer.latent, hidden, qkv, at, cache, metadata, layer.params, lora
            )
        if layer.wide_qk_norm is not None:
            qkv = self._norm_rows(qkv, layer.wide_qk_norm)
        if at.query_scale is not None:
            qkv[:, : self.heads.sizes[0]] *= at.query_scale
        heads, width = self._heads_by_width[qkv.shape[1]], self._config.value_width
        if self._config.value_dim is not None:
            qkv = _with_wide_values(qkv, heads, width, self._config.value_scale)
        rows = QKVRows(qkv, at.cos, at.sin, heads, layer.qk_norm)
        if self._qkv_attention is not None and layer.rotated_qk_norm is None:
            attended = self._qkv_attention.forward_qkv(rows, cache, metadata, layer.params)
            return attended[..., :width].reshape(attended.shape[0], -1)
        query, key, value = self._ops.rotate_qkv(
            rows.qkv, rows.cos, rows.sin, rows.shape, rows.norm
        )
        if layer.rotated_qk_norm is not None:
            query = self._normed(query, layer.rotated_qk_norm.query)
            key = self._normed(key, layer.rotated_qk_norm.key)
        attended = self._attention.forward(query, key, value, cache, metadata, layer.params)
        return attended[..., :width].reshape(attended.shape[0], -1)


def _head_shape(config: ModelConfig, layer: int) -> HeadShape:
    return HeadShape(
        config.num_heads,
        config.kv_heads(layer),
        config.head_dim,
        config.rms_norm_eps,
        config.interleaved,
    )


def _row_width(config: ModelConfig, layer: int) -> int:
    """Elements of a layer's queries, keys and values of a position."""
    keys = config.num_heads + config.kv_heads(layer)
    return keys * config.head_dim + config.kv_heads(layer) * config.value_width


def _with_wide_values(
    qkv: torch.Tensor, heads: HeadShape, width: int, scale: float | None
) -> torch.Tensor:
    """Scales the values of QKV rows, and pads them from `width` to the width of keys."""
    begin = sum(heads.sizes[:2])
    values = qkv[:, begin:].reshape(len(qkv), heads.num_kv_heads, width)
    if scale is not None:
        values = values * scale
    padded = F.pad(values, (0, heads.head_dim - width))
    return torch.cat((qkv[:, :begin], padded.flatten(1)), dim=-1)


def _latent_attention(
    config: ModelConfig, ops: Ops, attention: AttentionBackend
) -> LatentAttention | None:
    """None if the model's attention is not over latents."""
    if config.latent is None:
        return None
    return LatentAttention(ops, latent_backend(attention), config.interleaved)


def _rounded(scale: float | None, dtype: torch.dtype) -> float | None:
    """Rounds to the weights' dtype, as in training; on the host, because a step must not wait."""
    return None if scale is None else float(torch.tensor(scale, dtype=dtype))


def finish_logits(config: ModelConfig, logits: torch.Tensor) -> torch.Tensor:
    """Divides and caps a head's logits as the model requires."""
    divisor = config.logits_divisor
    scaled = logits if divisor is None else logits / divisor
    return soft_cap(scaled, config.logits_softcap)


def samples_every_row(batch: ForwardBatch) -> bool:
    """Whether every row is a decode that samples, in the order of the rows."""
    count, metadata = len(batch.logits_rows), batch.metadata
    if metadata.decode_count is not None:
        return False
    return metadata.num_decodes == len(batch.input_ids) == count
