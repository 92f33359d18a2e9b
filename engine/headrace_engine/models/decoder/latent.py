"""Attention over latents (MLA, https://arxiv.org/abs/2405.04434), by absorbed products.

A key of a head is a matrix times the latent, so its product with a query is that of the latent with
the query times the matrix. Queries are multiplied once, and no key or value is ever made from a
cached latent: attention sees one KV head, whose keys are latents with the rotated key that all
heads share, and whose values are the latents.
"""

from dataclasses import dataclass

import torch

from ...checkpoints.config import LatentConfig
from ...core.attention_backend import AttentionMetadata, LatentBackend, LayerCache, LayerParams
from ...layers.layers import Linear
from ...lora.batch import LayerLoRA
from ...operators.base import Ops, rotate_heads
from .positions import LayerPositions

# DeepSeek's norms of latents do not follow rms_norm_eps.
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """A layer's weights beside its first product and its output.

    query       makes queries from the normalised part of the first product; None: they are in it
    keys        [H, plain, rank]
    values      [H, rank, value]
    """

    config: LatentConfig
    query: Linear | None
    query_norm: torch.Tensor | None
    norm: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Computes the attention of layers with the same operators and backend."""

    ops: Ops
    backend: LatentBackend
    interleaved: bool

    def __call__(
        self,
        weights: LatentWeights,
        rows: torch.Tensor,
        at: LayerPositions,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
        lora: LayerLoRA | None,
    ) -> torch.Tensor:
        """Attends for the first product's rows [T, queries + rank + rotary]: [T, H * value]."""
        config, tokens = weights.config, len(rows)
        width = rows.shape[1] - config.width
        asked, latent, key = torch.split(rows, [width, config.rank, config.rotary], dim=-1)
        queries = self._queries(weights, asked, lora).view(tokens, -1, config.query_width)
        plain, rotated = torch.split(queries, [config.plain, config.rotary], dim=-1)
        absorbed = torch.bmm(plain.transpose(0, 1), weights.keys).transpose(0, 1)
        rotated = rotate_heads(rotated, at.cos, at.sin, interleaved=self.interleaved)
        shared = rotate_heads(key[:, None], at.cos, at.sin, interleaved=self.interleaved)[:, 0]
        attended = self.backend.forward_latent(
            torch.cat((absorbed, rotated), dim=-1),
            torch.cat((self.ops.rms_norm(latent.contiguous(), weights.norm, EPSILON), shared), -1),
            cache,
            metadata,
            params,
            config.rank,
        )
        return torch.bmm(attended.transpose(0, 1), weights.values).transpose(0, 1).flatten(1)

    def _queries(
        self, weights: LatentWeights, asked: torch.Tensor, lora: LayerLoRA | None
    ) -> torch.Tensor:
        if weights.query is None or weights.query_norm is None:
            return asked.contiguous()
        normed = self.ops.rms_norm(asked.contiguous(), weights.query_norm, EPSILON)
        queries = weights.query(normed)
        if lora is not None:
            lora.add("query_up", normed, queries)
        return queries
