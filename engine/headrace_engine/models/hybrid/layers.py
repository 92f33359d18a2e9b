"""The parts of hybrid decoders: attention, and layers with a recurrent state.

Each maps the normalised rows [T, H] of a step to [T, H]. The recurrent ones run one sequence after
the other (see recurrences).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from ...core.attention_backend import AttentionBackend, LayerCache, LayerParams
from ...core.recurrent_state import StateTensor
from ...layers.feed_forward import FeedForward
from ...layers.layers import Linear
from ...lora.batch import LayerLoRA
from ...operators.base import HeadShape, Ops, QKNorm
from ..base import ForwardBatch
from .recurrences import causal_conv, gated_delta_rule
from .state_memory import StateMemory


@dataclass(frozen=True, slots=True)
class HybridStep:
    """One step, with cos and sin [T, rotated / 2] of its tokens."""

    batch: ForwardBatch
    caches: Sequence[LayerCache]
    memory: StateMemory
    cos: torch.Tensor
    sin: torch.Tensor


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
    """A gated MLP or a mixture of experts."""

    feed_forward: FeedForward

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        return self.feed_forward(x)


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


# Maps one run's rows, and the state before it, to its outputs and the state after it.
Advance = Callable[
    [tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]],
    tuple[torch.Tensor, tuple[torch.Tensor, ...]],
]


def scan(
    layer: int, step: HybridStep, inputs: tuple[torch.Tensor, ...], advance: Advance
) -> torch.Tensor:
    """Advances the states of layer number `layer` of those with a state, and writes them.

    `inputs` [T, ...] are cut into runs. Returns the outputs of all tokens.
    """
    memory = step.memory
    before = memory.read(layer)
    states = [tuple(part[index] for part in before) for index in range(len(before[0]))]
    count = len(memory.batch.targets)
    after = [part.new_empty(count, *part.shape[1:]) for part in before]
    outputs: list[torch.Tensor] = []
    for run in memory.batch.runs:
        rows = tuple(part[run.begin : run.end] for part in inputs)
        output, states[run.sequence] = advance(rows, states[run.sequence])
        outputs.append(output)
        for target in run.writes:
            for part, state in zip(after, states[run.sequence], strict=True):
                part[target] = state
    memory.write(layer, after)
    return torch.cat(outputs)


@dataclass(frozen=True, slots=True)
class Convolution:
    """The weights [C, K] and bias [C] of a convolution of each channel."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return causal_conv(x, window, self.weight, self.bias)


def conv_state(channels: int, size: int, dtype: torch.dtype) -> StateTensor:
    """The inputs of a convolution that the next token needs."""
    return StateTensor((channels, size - 1), dtype)


@dataclass(frozen=True, slots=True)
class ShortConvLayer:
    """LFM2's gated short convolution."""

    index: int
    input: Linear
    convolution: Convolution
    output: Linear

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        before, after, inner = self.input(x).chunk(3, dim=-1)
        mixed = scan(self.index, step, (before * inner,), self._advance)
        return self.output(after * mixed)

    def _advance(
        self, rows: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        output, window = self.convolution(rows[0], state[0])
        return output, (window,)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads of a gated delta net: each key head serves the same number of value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> StateTensor:
        return StateTensor((self.value_heads, self.key_dim, self.value_dim), torch.float32)


class DeltaProjections(Protocol):
    """The products before a gated delta net."""

    def __call__(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of x [T, H]: queries, keys and values [T, C]; gates [T, Hv, V]; beta's and decay's
        inputs, both [T, Hv]."""


@dataclass(frozen=True, slots=True)
class GatedDeltaLayer:
    """The gated delta net of Qwen3-Next and Qwen 3.5.

    `a_log` and `dt_bias` [Hv] are float32; `norm` [V].
    """

    index: int
    projections: DeltaProjections
    convolution: Convolution
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    output: Linear
    shape: DeltaShape

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        mixed, gate, beta, decay = self.projections(x)
        decays = -self.a_log.exp() * F.softplus(decay.float() + self.dt_bias)
        inputs = (mixed, decays, beta.sigmoid().float())
        outputs = scan(self.index, step, inputs, self._advance).to(x.dtype)
        return self.output(gated_norm(outputs, gate, self.norm, self.eps).flatten(1))

    def _advance(
        self, rows: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return advance_delta(self.shape, self.convolution, rows, state)


def advance_delta(
    shape: DeltaShape,
    convolution: Convolution,
    rows: tuple[torch.Tensor, ...],
    state: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Advances a gated delta net by rows of (queries, keys and values; decays; betas)."""
    mixed, decay, beta = rows
    convolved, window = convolution(mixed, state[0])
    widths = [shape.key_width, shape.key_width, shape.value_width]
    query, key, value = torch.split(F.silu(convolved).float(), widths, dim=-1)
    repeats = shape.value_heads // shape.key_heads
    query, key = (
        _normed(part.reshape(len(mixed), -1, shape.key_dim)).repeat_interleave(repeats, dim=1)
        for part in (query, key)
    )
    outputs, matrix = gated_delta_rule(
        query * shape.key_dim**-0.5,
        key,
        value.reshape(len(mixed), -1, shape.value_dim),
        decay,
        beta,
        state[1],
    )
    return outputs, (window, matrix)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm of each head of x, times silu(gate), both [T, Hv, V]."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((weight * normed.to(x.dtype)) * F.silu(gate.float())).to(x.dtype)


def _normed(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
