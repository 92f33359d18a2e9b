"""One rank's part of a decoder, and where the ranks' results meet: a sum behind the embedding,
behind attention and behind the MLP, and the gathered logits."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ..attention.base import AttentionBackend
from ..lora.batch import LayerLoRA
from ..lora.shapes import LayerShapes, lora_shapes
from .config import ModelConfig
from .decoder import Decoder
from .decoder_weights import DecoderLayer, DecoderWeights
from .feed_forward import FeedForward
from .layers import Linear
from .ops import Ops, QKNorm
from .parallel import Collectives, Shard, WeightCuts, narrow
from .positions import PositionTables


class ParallelDecoder(Decoder):
    """`weights` are the rank's own, read with its cuts; `embeddings` are the embedding's rows on
    all ranks together. Logits are whole on rank 0 and of no meaning elsewhere."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        positions: PositionTables,
        ops: Ops,
        attention: AttentionBackend,
        *,
        shard: Shard,
        embeddings: int,
    ) -> None:
        joined = _join(weights, config.vocab_size, shard)
        super().__init__(narrow(config, shard.size), joined, positions, ops, attention)
        self._shard = shard
        self._lora_shapes = lora_shapes(config, WeightCuts(config, shard).ranges)
        self._first, _ = shard.share(embeddings)

    @property
    def lora_shapes(self) -> tuple[LayerShapes, ...]:
        return self._lora_shapes

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Each rank looks up the ids that it has; of the others its rows are 0."""
        own = ids - self._first
        absent = (own < 0) | (own >= len(self._embedding))
        rows = F.embedding(own.masked_fill(absent, 0), self._embedding)
        return self._shard.collectives.all_reduce(rows.masked_fill(absent[:, None], 0))

    def _project(
        self, layer: DecoderLayer, attended: torch.Tensor, lora: LayerLoRA | None
    ) -> torch.Tensor:
        """Each rank has some of the inputs, of adapters too, so that there is one sum for both."""
        return _sum(super()._project(layer, attended, lora), self._shard.collectives)

    def _norm_rows(self, qkv: torch.Tensor, norm: QKNorm) -> torch.Tensor:
        """Over the heads of all ranks: each has as many, and KV heads that ranks share count for
        each of them."""
        query, key, value = torch.split(qkv, list(self._heads.sizes), dim=-1)
        squares = torch.stack([part.float().square().mean(-1) for part in (query, key)])
        means = _sum(squares, self._shard.collectives) / self._shard.size
        scales = torch.rsqrt(means + self._heads.eps)[..., None]
        query = norm.query * (query * scales[0]).to(qkv.dtype)
        key = norm.key * (key * scales[1]).to(qkv.dtype)
        return torch.cat((query, key, value), dim=-1)


@dataclass(frozen=True, slots=True)
class SummedFeedForward:
    """A feed-forward part whose inner units are divided among the ranks."""

    own: FeedForward
    collectives: Collectives

    @property
    def can_be_recorded(self) -> bool:
        return self.own.can_be_recorded

    def __call__(
        self, x: torch.Tensor, lora: LayerLoRA | None = None, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _sum(self.own(x, lora, slots), self.collectives)


@dataclass(frozen=True, slots=True)
class GatheredHead:
    """A head whose `outputs` are divided among the ranks. Rank 0 has them all."""

    own: Linear
    outputs: int
    shard: Shard

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 0:
            return x.new_empty(0, self.outputs)
        size, part = self.shard.size, self.own(x)
        width = -(-self.outputs // size)
        parts = self.shard.collectives.gather(F.pad(part, (0, width - part.shape[1])))
        if not parts:
            return part
        return torch.cat(_trimmed(parts, self.outputs), dim=1)


def _trimmed(parts: Rows[torch.Tensor], outputs: int) -> list[torch.Tensor]:
    """The parts without what filled them up to one width."""
    ends = [(rank + 1) * outputs // len(parts) for rank in range(len(parts))]
    return [
        part[:, : end - start] for part, start, end in zip(parts, [0, *ends], ends, strict=False)
    ]


def _sum(x: torch.Tensor, collectives: Collectives) -> torch.Tensor:
    return collectives.all_reduce(x) if x.numel() else x


def _join(weights: DecoderWeights, outputs: int, shard: Shard) -> DecoderWeights:
    """The rank's weights, with what makes the ranks' results one behind them."""

    def join(layer: DecoderLayer) -> DecoderLayer:
        return replace(layer, mlp=SummedFeedForward(layer.mlp, shard.collectives))

    return replace(
        weights,
        layers=[join(layer) for layer in weights.layers],
        lm_head=GatheredHead(weights.lm_head, outputs, shard),
    )
