"""One rank's part of a decoder, and where the ranks' results are joined: sums after the embedding,
attention and MLP, and gathered logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ...checkpoints.config import ModelConfig
from ...core.attention_backend import AttentionBackend
from ...layers.feed_forward import FeedForward, SparseMoe
from ...layers.layers import Linear
from ...lora.batch import LayerLoRA
from ...lora.shapes import LayerShapes, lora_shapes
from ...operators.base import Ops, QKNorm
from ..parallel import Collectives, Shard, WeightCuts, shard_config
from .decoder import Decoder
from .decoder_weights import DecoderLayer, DecoderWeights
from .positions import PositionTables


class ParallelDecoder(Decoder):
    """One rank's decoder. `weights` are this rank's part; `embeddings` is the number of rows of the
    whole embedding. Logits are complete on rank 0 and undefined on other ranks. With
    `returns_states` every rank returns the whole hidden states instead."""

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
        returns_states: bool = False,
    ) -> None:
        joined = _join(weights, config.vocab_size, shard)
        if returns_states:
            joined = replace(joined, lm_head=_unchanged)
        super().__init__(shard_config(config, shard), joined, positions, ops, attention)
        self._shard = shard
        self._lora_shapes = lora_shapes(config, WeightCuts(config, shard).ranges)
        self._first, _ = shard.share(embeddings)

    @property
    def lora_shapes(self) -> tuple[LayerShapes, ...]:
        return self._lora_shapes

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Looks up the ids of this rank's part; rows of other ids are 0, so that the sum is
        right."""
        return look_up(ids, self._embedding, self._first, self._shard.collectives)

    def _project(
        self, layer: DecoderLayer, attended: torch.Tensor, lora: LayerLoRA | None
    ) -> torch.Tensor:
        """Adapters are split by inputs like the weights, so one sum serves both."""
        return summed(super()._project(layer, attended, lora), self._shard.collectives)

    def _norm_rows(self, qkv: torch.Tensor, norm: QKNorm) -> torch.Tensor:
        """Normalises over the heads of all ranks, of which every rank has the same number.

        A KV head that several ranks share is counted once for each of them.
        """
        query, key, value = torch.split(qkv, list(self.heads.sizes), dim=-1)
        squares = torch.stack([part.float().square().mean(-1) for part in (query, key)])
        means = summed(squares, self._shard.collectives) / self._shard.size
        scales = torch.rsqrt(means + self.heads.eps)[..., None]
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
        return summed(self.own(x, lora, slots), self.collectives)


@dataclass(frozen=True, slots=True)
class GatheredHead:
    """A head whose `outputs` are divided among the ranks. Rank 0 gathers all logits."""

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


def look_up(
    ids: torch.Tensor, part: torch.Tensor, first: int, collectives: Collectives
) -> torch.Tensor:
    """The rows of these ids in an embedding that ranks share, of which this rank has the `part`
    that begins with row `first`."""
    own = ids - first
    absent = (own < 0) | (own >= len(part))
    rows = F.embedding(own.masked_fill(absent, 0), part)
    return collectives.all_reduce(rows.masked_fill(absent[:, None], 0))


def _trimmed(parts: Sequence[torch.Tensor], outputs: int) -> list[torch.Tensor]:
    """The parts without the padding that made them equally wide."""
    ends = [(rank + 1) * outputs // len(parts) for rank in range(len(parts))]
    return [
        part[:, : end - start] for part, start, end in zip(parts, [0, *ends], ends, strict=False)
    ]


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def summed(x: torch.Tensor, collectives: Collectives) -> torch.Tensor:
    return collectives.all_reduce(x) if x.numel() else x


def _join(weights: DecoderWeights, outputs: int, shard: Shard) -> DecoderWeights:
    """Wraps this rank's layers so that their results are joined with those of other ranks."""

    def join(layer: DecoderLayer) -> DecoderLayer:
        mlp, shortcut = layer.mlp, layer.shortcut
        if isinstance(shortcut, SparseMoe) and shard.rank:
            shortcut = replace(shortcut, returns_rows=False)
        return replace(
            layer,
            mlp=SummedFeedForward(mlp, shard.collectives),
            shortcut=None if shortcut is None else SummedFeedForward(shortcut, shard.collectives),
        )

    return replace(
        weights,
        layers=[join(layer) for layer in weights.layers],
        lm_head=GatheredHead(weights.lm_head, outputs, shard),
    )
