"""Recurrent parts of layers with random weights and rows."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from headrace_engine.core.recurrent_state import StateTensor
from headrace_engine.operators.recurrent import (
    Convolution,
    DeltaShape,
    DeltaWeights,
    Mamba2Shape,
    Mamba2Weights,
    MambaWeights,
    Recurrences,
    conv_state,
)
from headrace_engine.operators.state_memory import StateMemory

from .recurrent_scenes import LAYER, random

CPU = torch.device("cpu")
Weights = TypeVar("Weights")

Part = Callable[[list[torch.Tensor], StateMemory], torch.Tensor]


@dataclass(frozen=True)
class Scene:
    """A recurrent part with random weights. `build` gives its computation by some recurrences on a
    device, of rows with `widths` elements. With `rounds` it stores more than outputs in the rows'
    dtype."""

    build: Callable[[Recurrences, torch.device], Part]
    widths: tuple[tuple[int, ...], ...]
    tensors: tuple[StateTensor, ...]
    rounds: bool = False

    def make(self, recurrences: Recurrences, device: torch.device = CPU) -> Part:
        return self.build(recurrences, device)

    def rows(self, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [
            random(tokens, *width, seed=10 + seed, dtype=dtype)
            for seed, width in enumerate(self.widths)
        ]


def placed(weights: Weights, device: torch.device) -> Weights:
    """A dataclass with its tensors, and those of dataclasses in it, on a device."""
    changed: dict[str, Any] = {}
    parts: Any = weights
    for field in fields(parts):
        value = getattr(parts, field.name)
        if isinstance(value, torch.Tensor):
            changed[field.name] = value.to(device)
        elif is_dataclass(value):
            changed[field.name] = placed(value, device)
    found: Weights = replace(parts, **changed)
    return found


def convolution(channels: int, size: int, dtype: torch.dtype, *, bias: bool = False) -> Convolution:
    weight = random(channels, size, seed=1, dtype=dtype)
    return Convolution(weight, random(channels, seed=2, dtype=dtype) if bias else None)


def gated_delta(shape: DeltaShape, dtype: torch.dtype, size: int = 4, **options: Any) -> Scene:
    weights = DeltaWeights(
        convolution=convolution(shape.channels, size, dtype, **options),
        a_log=random(shape.value_heads, seed=3),
        dt_bias=random(shape.value_heads, seed=4),
        norm=random(shape.value_dim, seed=5, dtype=dtype),
        eps=1e-6,
        shape=shape,
    )

    def make(recurrences: Recurrences, device: torch.device) -> Part:
        part = recurrences.gated_delta(placed(weights, device))
        return lambda rows, memory: part(rows[0], rows[1], rows[2], rows[3], LAYER, memory)

    heads = (shape.value_heads,)
    widths = ((shape.channels,), (*heads, shape.value_dim), heads, heads)
    window = StateTensor((shape.channels, size - 1), dtype)
    return Scene(make, widths, (window, shape.state))


def channel_delta(heads: int, width: int, dtype: torch.dtype) -> Scene:
    """Kimi Delta Attention."""
    shape = DeltaShape(heads, heads, width, width)
    weights = DeltaWeights(
        convolution=convolution(shape.channels, 4, dtype),
        a_log=random(heads, seed=3),
        dt_bias=random(heads, width, seed=4),
        norm=random(width, seed=5, dtype=dtype),
        eps=1e-6,
        shape=shape,
    )

    def make(recurrences: Recurrences, device: torch.device) -> Part:
        part = recurrences.gated_delta(placed(weights, device))
        return lambda rows, memory: part(rows[0], rows[1], rows[2], rows[3], LAYER, memory)

    widths = ((shape.channels,), (heads, width), (heads,), (heads * width,))
    return Scene(make, widths, (conv_state(shape.channels, 4, dtype), shape.state))


def state_space(
    shape: Mamba2Shape, dtype: torch.dtype, *, normed: bool = True, norm_first: bool = False
) -> Scene:
    norm = random(shape.width, seed=6, dtype=dtype)
    weights = Mamba2Weights(
        convolution=convolution(shape.channels, shape.window, dtype, bias=normed),
        a_log=random(shape.heads, seed=3),
        dt_bias=random(shape.heads, seed=4),
        skip=random(shape.heads, seed=5),
        norm=norm if normed else None,
        eps=1e-5,
        shape=shape,
        norm_first=norm_first,
    )

    def make(recurrences: Recurrences, device: torch.device) -> Part:
        part = recurrences.state_space(placed(weights, device))
        return lambda rows, memory: part(rows[0], rows[1], rows[2], LAYER, memory)

    widths = ((shape.channels,), (shape.width,), (shape.heads,))
    return Scene(make, widths, shape.states(dtype))


def selective_scan(channels: int, state_size: int, dtype: torch.dtype, size: int = 4) -> Scene:
    weights = MambaWeights(
        convolution=convolution(channels, size, dtype, bias=True),
        a_log=random(channels, state_size, seed=3),
        skip=random(channels, seed=4),
    )
    mixing = random(channels, channels + 2 * state_size, seed=5) / channels**0.5

    def make(recurrences: Recurrences, device: torch.device) -> Part:
        factors = mixing.to(device)

        def select(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            # One row after the other, so that a row's bits do not depend on the others.
            selected = torch.stack([row.float() @ factors for row in values]).to(values.dtype)
            widths = [channels, state_size, state_size]
            steps, b, c = torch.split(selected, widths, dim=-1)
            return steps, b, c

        part = recurrences.selective_scan(placed(weights, device))
        return lambda rows, memory: part(rows[0], rows[1], select, LAYER, memory)

    matrix = StateTensor((channels, state_size), torch.float32)
    tensors = (conv_state(channels, size, dtype), matrix)
    return Scene(make, ((channels,), (channels,)), tensors, rounds=True)


def short_convolution(channels: int, size: int, dtype: torch.dtype, **options: Any) -> Scene:
    weights = convolution(channels, size, dtype, **options)

    def make(recurrences: Recurrences, device: torch.device) -> Part:
        part = recurrences.short_convolution(placed(weights, device))
        return lambda rows, memory: part(rows[0], rows[1], rows[2], LAYER, memory)

    return Scene(make, ((channels,),) * 3, (conv_state(channels, size, dtype),), rounds=True)


SCENES: dict[str, Callable[[torch.dtype], Scene]] = {
    "gated delta": lambda dtype: gated_delta(DeltaShape(2, 4, 16, 8), dtype),
    "gated delta, uneven": lambda dtype: gated_delta(
        DeltaShape(3, 3, 24, 100), dtype, size=3, bias=True
    ),
    "gated delta, large": lambda dtype: gated_delta(DeltaShape(1, 2, 128, 128), dtype, size=6),
    "delta by channel": lambda dtype: channel_delta(3, 24, dtype),
    "state space": lambda dtype: state_space(Mamba2Shape(8, 12, 2, 16, 4), dtype),
    "state space, uneven": lambda dtype: state_space(
        Mamba2Shape(3, 25, 3, 21, 3), dtype, norm_first=True
    ),
    "state space, large": lambda dtype: state_space(
        Mamba2Shape(2, 64, 1, 128, 4), dtype, normed=False
    ),
    "selective scan": lambda dtype: selective_scan(96, 16, dtype),
    "selective scan, uneven": lambda dtype: selective_scan(77, 10, dtype, size=3),
    "short convolution": lambda dtype: short_convolution(64, 3, dtype),
    "short convolution, uneven": lambda dtype: short_convolution(75, 2, dtype, bias=True),
}
