"""A decoder of residual parts of any kind, in any order: attention, recurrent layers and MLPs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ...core.attention_backend import LayerCache
from ...core.recurrent_state import StateLayout, StateTensor
from ...layers.layers import Linear
from ...lora.shapes import LayerShapes
from ...operators.base import Float32NormOps, Ops
from ...operators.state_memory import StateMemory
from ..base import ForwardBatch, KVShape, state_layout
from ..rotary.rotary import RotaryTable
from .adapters import AdaptedLayers
from .layers import HybridLayer, HybridStep


@dataclass(frozen=True, slots=True)
class ResidualPart:
    """Adds layer(norm(x)), times `multiplier`, to x."""

    norm: torch.Tensor
    layer: HybridLayer
    multiplier: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridWeights:
    """A decoder's weights. `kv_shapes` are of the layers with KV, `state_tensors` the state of each
    of the `num_state_layers` recurrent ones. `without_kv`: `kv_shapes` is memory for states alone.
    With `float32_residual` the sum of the parts is in float32."""

    embedding: torch.Tensor
    parts: Sequence[ResidualPart]
    norm: torch.Tensor
    lm_head: Linear
    eps: float
    kv_shapes: tuple[KVShape, ...]
    state_tensors: tuple[StateTensor, ...]
    num_state_layers: int
    embedding_scale: float = 1.0
    logits_divisor: float = 1.0
    without_kv: bool = False
    float32_residual: bool = False


class HybridDecoder:
    """A decoder whose layers keep KV or a recurrent state. `adapters` is what made its linear
    layers add adapters."""

    def __init__(
        self, weights: HybridWeights, ops: Ops, rotary: RotaryTable, adapters: AdaptedLayers
    ) -> None:
        self._weights, self._rotary, self._adapters = weights, rotary, adapters
        narrower = weights.norm.dtype is not weights.embedding.dtype
        self._ops: Ops = Float32NormOps(ops) if narrower else ops
        self.vocab_size = len(weights.embedding)
        self.kv_shapes = weights.kv_shapes
        self.state_tensors = weights.state_tensors
        self.num_state_layers = weights.num_state_layers
        self._layout: StateLayout | None = None

    @property
    def lora_shapes(self) -> tuple[LayerShapes, ...]:
        return self._adapters.shapes

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        return self.to_logits(self.states(batch, caches))

    def to_logits(self, normed: torch.Tensor) -> torch.Tensor:
        return self._weights.lm_head(normed) / self._weights.logits_divisor

    def states(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """The hidden states of the rows that sample, after the last norm."""
        weights, step = self._weights, self._step(batch, caches)
        self._adapters.batch = batch.lora
        x = self._lookup(batch.input_ids) * weights.embedding_scale
        if batch.vision is not None:
            x.index_copy_(0, batch.vision.rows, batch.vision.embeddings[0].to(x.dtype))
        dtype = x.dtype
        if weights.float32_residual:
            x = x.float()
        for part in weights.parts:
            added = part.layer(self._ops.rms_norm(x.to(dtype), part.norm, weights.eps), step)
            x = torch.add(x, self._join(added), alpha=part.multiplier)
        rows = x.index_select(0, batch.logits_rows).to(dtype)
        return self._ops.rms_norm(rows, weights.norm, weights.eps)

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._weights.embedding)

    def _join(self, added: torch.Tensor) -> torch.Tensor:
        """What a part adds, of which this process may have computed only a share."""
        return added

    def _step(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> HybridStep:
        assert batch.states is not None, "the batch has no states"
        if self._layout is None:
            self._layout = state_layout(self, sum(part[0].nbytes for part in caches[0]))
        memory = StateMemory(self._layout, caches, batch.states)
        return HybridStep(
            batch, caches, memory, *self._rotary.lookup(batch.positions, batch.vision)
        )


class HybridStates:
    """A hybrid decoder that returns hidden states in place of logits."""

    def __init__(self, decoder: HybridDecoder) -> None:
        self._decoder = decoder
        self.vocab_size, self.kv_shapes = decoder.vocab_size, decoder.kv_shapes

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        return self._decoder.states(batch, caches)
