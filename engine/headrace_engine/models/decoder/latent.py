"""Attention over latents (MLA, https://arxiv.org/abs/2405.04434), by absorbed products.

A key of a head is a matrix times the latent, so its product with a query is that of the latent with
the query times the matrix. Queries are multiplied once, and no key or value is ever made from a
cached latent: attention sees one KV head, whose keys are latents with the rotated key that all
heads share, and whose values are the latents. An indexer may choose few of them for each position,
for one layer or for several.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ...attention.indexed import Choice, IndexRows, attend_to_chosen, choose_keys
from ...checkpoints.config import IndexConfig, LatentConfig
from ...core.attention_backend import AttentionMetadata, LatentBackend, LayerCache, LayerParams
from ...layers.layers import Linear
from ...lora.batch import LayerLoRA
from ...operators.base import Ops, rotate_heads
from .positions import LayerPositions

# DeepSeek's norms of latents do not follow rms_norm_eps.
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class IndexWeights:
    """The weights of an indexer.

    query       makes its queries from what the layer's queries are made from
    key         makes its key from the hidden state, which a layer norm normalises
    heads       float32 [heads, hidden]: makes the weights of its heads, with all factors
    """

    config: IndexConfig
    query: Linear
    key: Linear
    norm: torch.Tensor
    norm_bias: torch.Tensor
    heads: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """A layer's weights beside its first product and its output.

    query       makes queries from the normalised part of the first product; None: they are in it
    keys        [H, plain, rank]
    values      [H, rank, value]
    index       the indexer; None: the last indexer's choice is used, if there is any
    """

    config: LatentConfig
    query: Linear | None
    query_norm: torch.Tensor | None
    norm: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    index: IndexWeights | None = None


def divide_heads(config: LatentConfig, expanded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices of the heads' keys [H, plain, rank] and values [H, value, rank] in the stored
    matrix that makes both."""
    heads = expanded.view(-1, config.plain + config.value, config.rank)
    return heads[:, : config.plain], heads[:, config.plain :]


class LatentAttention:
    """Computes the attention of a step's layers, one after the other."""

    def __init__(self, ops: Ops, backend: LatentBackend, interleaved: bool) -> None:
        self.ops, self.backend, self.interleaved = ops, backend, interleaved
        # What the last indexer chose.
        self._choice: Choice = None

    def __call__(
        self,
        weights: LatentWeights,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        at: LayerPositions,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
        lora: LayerLoRA | None,
    ) -> torch.Tensor:
        """Attends for the layer's input `hidden` and the rows [T, queries + rank + rotary] of its
        first product: [T, H * value]."""
        config, tokens = weights.config, len(rows)
        width = rows.shape[1] - config.width
        asked, latent, key = torch.split(rows, [width, config.rank, config.rotary], dim=-1)
        if weights.query_norm is not None:
            asked = self.ops.rms_norm(asked.contiguous(), weights.query_norm, EPSILON)
        queries = self._queries(weights, asked, lora).view(tokens, -1, config.query_width)
        plain, rotated = torch.split(queries, [config.plain, config.rotary], dim=-1)
        absorbed = torch.bmm(plain.transpose(0, 1), weights.keys).transpose(0, 1)
        rotated = rotate_heads(rotated, at.cos, at.sin, interleaved=self.interleaved)
        shared = rotate_heads(key[:, None], at.cos, at.sin, interleaved=self.interleaved)[:, 0]
        query = torch.cat((absorbed, rotated), dim=-1)
        normed = self.ops.rms_norm(latent.contiguous(), weights.norm, EPSILON)
        latents, where = torch.cat((normed, shared), -1), (metadata, params, config.rank)
        if config.index is None:
            attended = self.backend.forward_latent(query, latents, cache, *where)
        else:
            if weights.index is not None:
                *stored, index_keys = cache
                cache, index = tuple(stored), weights.index
                made = self._index(index, config.rotary, hidden, asked, at)
                self._choice = choose_keys(made, index_keys, metadata)
            attended = attend_to_chosen(self.backend, query, latents, self._choice, cache, *where)
        return torch.bmm(attended.transpose(0, 1), weights.values).transpose(0, 1).flatten(1)

    def _queries(
        self, weights: LatentWeights, asked: torch.Tensor, lora: LayerLoRA | None
    ) -> torch.Tensor:
        if weights.query is None:
            return asked.contiguous()
        queries = weights.query(asked)
        if lora is not None:
            lora.add("query_up", asked, queries)
        return queries

    def _index(
        self,
        weights: IndexWeights,
        rotary: int,
        hidden: torch.Tensor,
        asked: torch.Tensor,
        at: LayerPositions,
    ) -> IndexRows:
        """What the indexer computes from the hidden state and from what queries are made from."""
        config, normed = weights.config, (weights.norm, weights.norm_bias, EPSILON)

        def rotated(x: torch.Tensor) -> torch.Tensor:
            heads = x.view(len(hidden), -1, config.width)
            turned, plain = heads[..., :rotary].contiguous(), heads[..., rotary:]
            turned = rotate_heads(turned, at.cos, at.sin, interleaved=config.interleaved)
            return torch.cat((turned, plain), dim=-1)

        return IndexRows(
            queries=rotated(weights.query(asked)),
            weights=F.linear(hidden.float(), weights.heads),
            keys=rotated(F.layer_norm(weights.key(hidden), (config.width,), *normed))[:, 0],
            kept=config.kept,
        )
