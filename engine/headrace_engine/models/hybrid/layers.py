"""The parts of hybrid decoders: attention, and layers with a recurrent state.

Each maps the normalised rows [T, H] of a step to [T, H].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...core.attention_backend import AttentionBackend, LayerCache, LayerParams
from ...layers.feed_forward import FeedForward
from ...layers.layers import Linear
from ...lora.batch import LayerLoRA
from ...operators.base import HeadShape, Ops, QKNorm
from ...operators.recurrent import GatedDelta, ShortConvolution
from ...operators.state_memory import StateMemory
from ..base import ForwardBatch


@dataclass(frozen=True, slots=True)
class HybridStep:
    """One step, with cos and sin [T, rotated / 2] of its tokens. `states` None: none of its layers
    has one."""

    batch: ForwardBatch
    caches: Sequence[LayerCache]
    states: StateMemory | None
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def memory(self) -> StateMemory:
        assert self.states is not None, "a layer with a state in a step without states"
        return self.states


class HybridLayer(Protocol):
    """Maps x [T, H] to [T, H]."""

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ScaledLinear:
    """A linear layer whose rows are multiplied by `before`, and whose outputs by `after`."""

    linear: Linear
    before: float = 1.0
    after: float | torch.Tensor = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.before) * self.after


@dataclass(frozen=True, slots=True)
class ParallelLayers:
    """The sum of several layers of the same rows."""

    layers: tuple[HybridLayer, ...]

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        return sum((layer(x, step) for layer in self.layers[1:]), self.layers[0](x, step))


@dataclass(frozen=True, slots=True)
class FeedForwardSum:
    """The sum of several feed-forward parts of the same input."""

    parts: tuple[FeedForward, ...]

    @property
    def can_be_recorded(self) -> bool:
        return all(part.can_be_recorded for part in self.parts)

    def __call__(
        self, x: torch.Tensor, lora: LayerLoRA | None = None, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        return sum((part(x, lora, slots) for part in self.parts[1:]), self.parts[0](x, lora, slots))


@dataclass(frozen=True, slots=True)
class FeedForwardLayer:
    """A gated MLP or a mixture of experts. Adapters of decoder layer `layer` change its experts;
    without a layer none does."""

    feed_forward: FeedForward
    layer: int | None = None

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        adapters = step.batch.lora
        if adapters is None or self.layer is None:
            return self.feed_forward(x)
        return self.feed_forward(x, adapters.of_tokens(self.layer))


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Paged attention, number `index` of the layers with KV.

    With `gated` the query product has a gate after each head's query, whose sigmoid multiplies the
    head's output (Qwen3-Next).
    """

    index: int
    query: Linear
    key_value: Linear
    output: Linear
    heads: HeadShape
    norm: QKNorm | None
    params: LayerParams
    attention: AttentionBackend
    ops: Ops
    gated: bool = False

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        query, gate = self.query(x), None
        if self.gated:
            heads = query.view(len(x), -1, 2 * self.heads.head_dim)
            query, gate = (part.flatten(1) for part in heads.chunk(2, dim=-1))
        qkv = torch.cat((query, self.key_value(x)), dim=-1)
        q, k, v = self.ops.rotate_qkv(qkv, step.cos, step.sin, self.heads, self.norm)
        metadata = step.batch.metadata_of(self.index)
        cache = step.caches[self.index]
        attended = self.attention.forward(q, k, v, cache, metadata, self.params).flatten(1)
        return self.output(attended if gate is None else attended * torch.sigmoid(gate))


@dataclass(frozen=True, slots=True)
class ShortConvLayer:
    """LFM2's gated short convolution."""

    index: int
    input: Linear
    convolution: ShortConvolution
    output: Linear

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        before, after, inner = self.input(x).chunk(3, dim=-1)
        return self.output(self.convolution(inner, before, after, self.index, step.memory))


class DeltaProjections(Protocol):
    """The products before a gated delta net."""

    def __call__(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of x [T, H]: queries, keys and values [T, C]; gates [T, Hv, V]; beta's and decay's
        inputs, both [T, Hv]."""


@dataclass(frozen=True, slots=True)
class GatedDeltaLayer:
    """The gated delta net of Qwen3-Next and Qwen 3.5."""

    index: int
    projections: DeltaProjections
    delta: GatedDelta
    output: Linear

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        mixed, gate, beta, decay = self.projections(x)
        return self.output(self.delta(mixed, gate, beta, decay, self.index, step.memory))
