"""Recurrent layers without their matrix products, as one protocol.

`TorchRecurrences` computes them in plain torch, one sequence after the other: correct on every
device, slow, and the reference in the tests of native kernels. Faster operators have other
implementations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional as F

from ..core.recurrent_state import StateTensor
from .recurrences import causal_conv, gated_delta_rule, selective_scan, state_space
from .state_memory import StateMemory


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


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """A gated delta net without its products. `a_log`, `dt_bias` [Hv] are float32; `norm` [V].

    Kimi Delta Attention (https://arxiv.org/abs/2510.26692) is one in which each channel of a key
    has its own decay: `dt_bias` is [Hv, K]. Its gate is a sigmoid.
    """

    convolution: Convolution
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    shape: DeltaShape

    @property
    def by_channel(self) -> bool:
        return self.dt_bias.ndim == 2


class GatedDelta(Protocol):
    """A gated delta net without its matrix products."""

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        decay: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        """Advances the states of recurrent layer `layer`, and returns [T, Hv * V].

        `mixed` [T, C] are queries, keys and values; `gate` is [T, Hv, V]; `beta` and `decay`
        [T, Hv] are the layer's inputs for both, before sigmoid and softplus. `decay` is
        [T, Hv * K] if each channel has its own decay.
        """


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Heads of a Mamba-2 layer; `groups` of them share the inputs B and C of `state_size`."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    window: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Values, B and C of a token, which the convolution mixes."""
        return self.width + 2 * self.groups * self.state_size

    def states(self, dtype: torch.dtype) -> tuple[StateTensor, StateTensor]:
        """The window of the convolution, and the state of each head."""
        matrix = StateTensor((self.heads, self.head_dim, self.state_size), torch.float32)
        return conv_state(self.channels, self.window, dtype), matrix


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """A Mamba-2 layer without its products. Its gate is applied before the norm, or after it with
    `norm_first`.

    `a_log`, `dt_bias` and `skip` [H] are float32; `norm` [H * P] is over each group of heads; None:
    there is no norm.
    """

    convolution: Convolution
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor | None
    eps: float
    shape: Mamba2Shape
    norm_first: bool = False


class StateSpace(Protocol):
    """A Mamba-2 layer without its matrix products."""

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        steps: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        """Advances the states of recurrent layer `layer`, and returns [T, H * P].

        `mixed` [T, C] are values, B and C; `gate` is [T, H * P]; `steps` [T, H] are the inputs of
        time steps.
        """


# Maps values [T, C] to the inputs of time steps [T, C], B and C, both [T, N].
Selection = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """A Mamba layer without its products. `a_log` [C, N] and `skip` [C] are float32."""

    convolution: Convolution
    a_log: torch.Tensor
    skip: torch.Tensor


class SelectiveScan(Protocol):
    """A Mamba layer without its first and last matrix product."""

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        select: Selection,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        """Advances the states of recurrent layer `layer`, and returns [T, C]. `mixed` and `gate`
        are [T, C]; `select` is called once, with the values [T, C] that the convolution makes of
        `mixed`."""


class ShortConvolution(Protocol):
    """A convolution between two gates."""

    def __call__(
        self,
        x: torch.Tensor,
        before: torch.Tensor,
        after: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        """Advances the states of recurrent layer `layer`, and returns [T, C]. All rows are
        [T, C]."""


class Recurrences(Protocol):
    """Makes the recurrent part of a layer from its weights, once."""

    def gated_delta(self, weights: DeltaWeights) -> GatedDelta: ...

    def state_space(self, weights: Mamba2Weights) -> StateSpace: ...

    def selective_scan(self, weights: MambaWeights) -> SelectiveScan: ...

    def short_convolution(self, convolution: Convolution) -> ShortConvolution: ...


@runtime_checkable
class RecurrentOps(Protocol):
    """Operators that implement recurrences."""

    @property
    def recurrences(self) -> Recurrences: ...


def recurrences_of(ops: object) -> Recurrences:
    """The recurrences of a set of operators, or else those in plain torch."""
    return ops.recurrences if isinstance(ops, RecurrentOps) else TorchRecurrences()


class TorchRecurrences:
    """Plain torch."""

    def gated_delta(self, weights: DeltaWeights) -> "TorchGatedDelta":
        return TorchGatedDelta(weights)

    def state_space(self, weights: Mamba2Weights) -> "TorchStateSpace":
        return TorchStateSpace(weights)

    def selective_scan(self, weights: MambaWeights) -> "TorchSelectiveScan":
        return TorchSelectiveScan(weights)

    def short_convolution(self, convolution: Convolution) -> "TorchShortConvolution":
        return TorchShortConvolution(convolution)


# Maps one run's rows, and the state before it, to its outputs and the state after it.
Advance = Callable[
    [tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]],
    tuple[torch.Tensor, tuple[torch.Tensor, ...]],
]


def scan(
    layer: int, memory: StateMemory, inputs: tuple[torch.Tensor, ...], advance: Advance
) -> torch.Tensor:
    """Advances the states of recurrent layer `layer`, and writes them.

    `inputs` [T, ...] are cut into runs. Returns the outputs of all tokens.
    """
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
class TorchGatedDelta:
    """A gated delta net, in torch."""

    weights: DeltaWeights

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        decay: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        weights = self.weights
        rates = -weights.a_log.exp()
        raised = decay.float().view(len(decay), *weights.dt_bias.shape) + weights.dt_bias
        decays = (rates[:, None] if weights.by_channel else rates) * F.softplus(raised)
        inputs = (mixed, decays, beta.sigmoid().float())
        advance = partial(_advance_delta, weights.shape, weights.convolution)
        outputs = scan(layer, memory, inputs, advance).to(mixed.dtype)
        if weights.by_channel:
            return _sigmoid_norm(outputs, gate, weights.norm, weights.eps).flatten(1)
        return _gated_norm(outputs, gate, weights.norm, weights.eps).flatten(1)


def _advance_delta(
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


def _gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm of each head of x, times silu(gate), both [T, Hv, V]."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((weight * normed.to(x.dtype)) * F.silu(gate.float())).to(x.dtype)


def _sigmoid_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm of each head of x, times sigmoid(gate), both [T, Hv, V]."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * normed * torch.sigmoid(gate.float())).to(x.dtype)


def _normed(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True, slots=True)
class TorchStateSpace:
    """A Mamba-2 layer, in torch."""

    weights: Mamba2Weights

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        steps: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        times = F.softplus(steps.float() + self.weights.dt_bias)
        found = scan(layer, memory, (mixed, times), self._advance)
        gates = F.silu(gate.float())
        if self.weights.norm_first:
            return (self._normed(found) * gates).to(mixed.dtype)
        return self._normed(found * gates).to(mixed.dtype)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        if weights.norm is None:
            return x
        grouped = x.view(len(x), weights.shape.groups, -1)
        scale = torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + weights.eps)
        return weights.norm * (grouped * scale).view(len(x), -1)

    def _advance(
        self, rows: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        weights, shape, count = self.weights, self.weights.shape, len(rows[0])
        convolved, window = weights.convolution(rows[0], state[0])
        inner = shape.groups * shape.state_size
        values, b, c = torch.split(F.silu(convolved).float(), [shape.width, inner, inner], dim=-1)
        repeats = shape.heads // shape.groups
        grouped = (count, shape.groups, shape.state_size)
        outputs, matrix = state_space(
            values.reshape(count, shape.heads, shape.head_dim),
            rows[1],
            -weights.a_log.exp(),
            b.reshape(grouped).repeat_interleave(repeats, dim=1),
            c.reshape(grouped).repeat_interleave(repeats, dim=1),
            weights.skip,
            state[1],
        )
        return outputs.flatten(1), (window, matrix)


@dataclass(frozen=True, slots=True)
class TorchSelectiveScan:
    """A Mamba layer, in torch."""

    weights: MambaWeights

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        select: Selection,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        weights = self.weights
        # The products of a step read all its rows at once, so convolutions come first.
        windows = list(memory.read(layer)[0])
        convolved, after = list[torch.Tensor](), list[torch.Tensor]()
        for run in memory.batch.runs:
            rows, window = mixed[run.begin : run.end], windows[run.sequence]
            output, windows[run.sequence] = weights.convolution(rows, window)
            convolved.append(F.silu(output))
            after.append(windows[run.sequence])
        values, following = torch.cat(convolved), iter(after)
        steps, b, c = select(values)

        def advance(
            rows: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            own, times, own_b, own_c = rows
            outputs, matrix = selective_scan(
                own, times, -weights.a_log.exp(), own_b, own_c, weights.skip, state[1]
            )
            return outputs, (next(following), matrix)

        inputs = (values.float(), F.softplus(steps.float()), b.float(), c.float())
        found = scan(layer, memory, inputs, advance)
        return (found * F.silu(gate.float())).to(mixed.dtype)


@dataclass(frozen=True, slots=True)
class TorchShortConvolution:
    """A convolution between two gates, in torch."""

    convolution: Convolution

    def __call__(
        self,
        x: torch.Tensor,
        before: torch.Tensor,
        after: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        return after * scan(layer, memory, (before * x,), self._advance)

    def _advance(
        self, rows: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        output, window = self.convolution(rows[0], state[0])
        return output, (window,)
