"""Mamba-2 layers, https://arxiv.org/abs/2405.21060."""

from dataclasses import dataclass, replace
from math import inf

import torch

from ...checkpoints.fields import Fields
from ...checkpoints.tensor_files import Shape
from ...layers.layers import Linear
from ...operators.base import Ops
from ...operators.recurrent import (
    Convolution,
    Mamba2Shape,
    Mamba2Weights,
    StateSpace,
    recurrences_of,
)
from .layers import HybridStep
from .ranks import Division
from .tensors import Tensors

# As JSON has it, and as transformers writes it.
_NO_LIMITS = ([0.0, inf], [0.0, {"__float__": "Infinity"}])


def check_steps(fields: Fields) -> None:
    """Raises ConfigError if time steps are limited."""
    if fields.get("time_step_limit", _NO_LIMITS[0]) not in _NO_LIMITS:
        raise fields.error("time_step_limit", "[0, Infinity]")


def read_shape(fields: Fields, width: int) -> Mamba2Shape:
    """Reads the fields whose names begin with mamba_, for heads of `width` elements in all."""
    heads = fields.integer("mamba_n_heads", 128)
    check_steps(fields)
    if fields.get("mamba_d_head", "auto") in ("auto", width // heads):
        dim = width // heads
    else:
        dim = 0
    if not dim or dim * heads != width:
        raise fields.error("mamba_d_head", f"{width} / mamba_n_heads")
    groups = fields.integer("mamba_n_groups", 1)
    if heads % groups:
        raise fields.error("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
    state_size = fields.integer("mamba_d_state", 256)
    return Mamba2Shape(heads, dim, groups, state_size, fields.integer("mamba_d_conv", 4))


def divide(name: str, shape: Mamba2Shape, whole: Shape) -> Division | None:
    """How ranks divide a layer's tensor by heads and their groups; None: not by these."""
    shared, named = shape.groups * shape.state_size, name.rpartition(".")[0].rpartition(".")[2]
    if named == "conv1d":
        return Division(0, (shape.width, shared, shared))
    if named == "in_proj":
        return Division(0, (shape.width, shape.width, shared, shared, shape.heads))
    by_head = named == "norm" or name.endswith((".A_log", ".D", ".dt_bias"))
    return Division(0, (whole[0],)) if by_head else None


def divided_shape(shape: Mamba2Shape, size: int) -> Mamba2Shape:
    """The part of one of `size` ranks."""
    return replace(shape, heads=shape.heads // size, groups=shape.groups // size)


@dataclass(frozen=True, slots=True)
class Mamba2Layer:
    """A Mamba-2 layer."""

    index: int
    input: Linear
    state_space: StateSpace
    output: Linear
    shape: Mamba2Shape

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        shape = self.shape
        widths = [shape.width, shape.channels, shape.heads]
        gate, mixed, steps = torch.split(self.input(x), widths, dim=-1)
        return self.output(self.state_space(mixed, gate, steps, self.index, step.memory))


def read_mamba2(
    tensors: Tensors,
    prefix: str,
    index: int,
    hidden: int,
    shape: Mamba2Shape,
    eps: float,
    ops: Ops,
    *,
    conv_bias: bool,
    proj_bias: bool,
    output_bias: bool | None = None,
    normed: bool = True,
    norm_first: bool = False,
) -> Mamba2Layer:
    """Reads the layer whose tensors' names begin with `prefix`. `output_bias` None: `proj_bias`."""
    heads, width, channels = shape.heads, shape.width, shape.channels
    vectors = [tensors.float32(prefix + name, heads) for name in ("dt_bias", "A_log", "D")]
    weight = tensors.tensor(f"{prefix}conv1d.weight", channels, 1, shape.window)
    bias = tensors.tensor(f"{prefix}conv1d.bias", channels) if conv_bias else None
    joint = width + channels + heads
    output_bias = proj_bias if output_bias is None else output_bias
    weights = Mamba2Weights(
        convolution=Convolution(weight[:, 0], bias),
        a_log=vectors[1],
        dt_bias=vectors[0],
        skip=vectors[2],
        norm=tensors.tensor(f"{prefix}norm.weight", width) if normed else None,
        eps=eps,
        shape=shape,
        norm_first=norm_first,
    )
    return Mamba2Layer(
        index=index,
        input=tensors.linear({f"{prefix}in_proj": joint}, hidden, proj_bias),
        state_space=recurrences_of(ops).state_space(weights),
        output=tensors.linear({f"{prefix}out_proj": hidden}, width, output_bias),
        shape=shape,
    )
