"""Multi-token prediction (MTP) of Qwen3-Next and Qwen 3.5: a layer with attention, without a
recurrent state."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ...core.attention_backend import LayerCache
from ...layers.layers import Linear
from ...operators.base import Float32NormOps, Ops
from ..base import ForwardBatch, KVShape
from ..draft_heads.base import HeadStates
from ..rotary.rotary import RotaryTable
from .decoder import ResidualPart
from .layers import HybridStep


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridMTPWeights:
    """The weights of an MTP layer, which computes `attention`, then `feed_forward`. `embedding` and
    `lm_head` are the decoder's."""

    embedding: torch.Tensor
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    projection: Linear
    attention: ResidualPart
    feed_forward: ResidualPart
    norm: torch.Tensor
    lm_head: Linear
    eps: float
    kv_shape: KVShape


class HybridMTPHead:
    """A loaded MTP layer. The next draft reads the result of the layer's last norm."""

    def __init__(self, weights: HybridMTPWeights, ops: Ops, rotary: RotaryTable) -> None:
        self._weights, self._rotary = weights, rotary
        narrower = weights.norm.dtype is not weights.embedding.dtype
        self._ops: Ops = Float32NormOps(ops) if narrower else ops
        self.kv_shapes = (weights.kv_shape,)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def forward(
        self, batch: ForwardBatch, hidden: torch.Tensor, caches: Sequence[LayerCache]
    ) -> HeadStates:
        weights = self._weights
        token = self._normed(self._lookup(batch.input_ids), weights.embedding_norm)
        state = self._normed(hidden, weights.hidden_norm)
        step = HybridStep(batch, caches, None, *self._rotary.lookup(batch.positions))
        x = weights.projection(torch.cat((token, state), dim=-1))
        x = x + self._added(weights.attention, x, step)
        x = x.index_select(0, batch.logits_rows)
        x = x + self._added(weights.feed_forward, x, step)
        normed = self._normed(x, weights.norm)
        return HeadStates(normed, normed)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return self._weights.lm_head(normed)

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._weights.embedding)

    def _added(self, part: ResidualPart, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        return self._join(part.layer(self._normed(x, part.norm), step))

    def _join(self, added: torch.Tensor) -> torch.Tensor:
        """What a part adds, of which this process may have computed only a share."""
        return added

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, weight, self._weights.eps)
