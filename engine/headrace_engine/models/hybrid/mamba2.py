"""Mamba-2 layers, https://arxiv.org/abs/2405.21060."""

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Self

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
from ..decoder.parallel_decoder import summed
from ..parallel import Shard
from .family import Family
from .layers import HybridStep
from .ranks import Division, SharedHeads
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


class WithMamba2(Family):
    """A family with Mamba-2 layers, whose tensors' names have `mamba_part`. `mamba_names` are the
    names of the numbers of heads and groups in config.json."""

    mamba_part: ClassVar[str] = ".mamba."
    mamba_names: ClassVar[tuple[str, str]] = ("mamba_n_heads", "mamba_n_groups")
    mamba: Mamba2Shape
    # Of the whole layer.
    groups: int

    def counts(self) -> dict[str, int]:
        return {**super().counts(), self.mamba_names[0]: self.mamba.heads}

    def shared_heads(self) -> dict[str, int]:
        return {**super().shared_heads(), self.mamba_names[1]: self.mamba.groups}

    def divided(self, shard: Shard) -> Self:
        part, shape = super().divided(shard), self.mamba
        groups = max(1, shape.groups // shard.size)
        part.mamba = replace(shape, heads=shape.heads // shard.size, groups=groups)
        part.groups = shape.groups
        return part

    def division(self, name: str, whole: Shape) -> Division | None:
        found = divide(name, self.mamba, whole) if self.mamba_part in name else None
        return super().division(name, whole) if found is None else found

    def mamba2(
        self,
        tensors: Tensors,
        ops: Ops,
        prefix: str,
        index: int,
        *,
        conv_bias: bool,
        proj_bias: bool,
        output_bias: bool | None = None,
        normed: bool = True,
        norm_first: bool = False,
    ) -> "Mamba2Layer":
        """Reads the layer whose tensors' names begin with `prefix`, number `index` of the recurrent
        ones. `output_bias` None: `proj_bias`."""
        shape, hidden, shard = self.mamba, self.hidden, self.shard
        heads, width, channels = shape.heads, shape.width, shape.channels
        vectors = [tensors.float32(prefix + name, heads) for name in ("dt_bias", "A_log", "D")]
        weight = tensors.tensor(f"{prefix}conv1d.weight", channels, 1, shape.window)
        bias = tensors.tensor(f"{prefix}conv1d.bias", channels) if conv_bias else None
        joint = width + channels + heads
        norm = tensors.tensor(f"{prefix}norm.weight", width) if normed else None
        joined = None
        if norm is not None and shard is not None and self.groups < shard.size:
            joined, norm = JoinedNorm(norm, self.groups, self.eps, shard), None
        weights = Mamba2Weights(
            convolution=Convolution(weight[:, 0], bias),
            a_log=vectors[1],
            dt_bias=vectors[0],
            skip=vectors[2],
            norm=norm,
            eps=self.eps,
            shape=shape,
            norm_first=norm_first,
        )
        output_bias = proj_bias if output_bias is None else output_bias
        return Mamba2Layer(
            index=index,
            input=tensors.linear({f"{prefix}in_proj": joint}, hidden, proj_bias),
            state_space=recurrences_of(ops).state_space(weights),
            output=tensors.linear({f"{prefix}out_proj": hidden}, width, output_bias),
            shape=shape,
            norm=joined,
        )


def divide(name: str, shape: Mamba2Shape, whole: Shape) -> Division | None:
    """How ranks divide a layer's tensor by heads and their groups; None: not by these."""
    shared = SharedHeads(shape.groups, shape.state_size)
    named = name.rpartition(".")[0].rpartition(".")[2]
    if named == "conv1d":
        return Division(0, (shape.width, shared, shared))
    if named == "in_proj":
        return Division(0, (shape.width, shape.width, shared, shared, shape.heads))
    by_head = named == "norm" or name.endswith((".A_log", ".D", ".dt_bias"))
    return Division(0, (whole[0],)) if by_head else None


@dataclass(frozen=True, slots=True)
class JoinedNorm:
    """The RMS norm of groups of heads, of which there are fewer than ranks. `weight` [W] is of this
    rank's heads, which are all of one group."""

    weight: torch.Tensor
    groups: int
    eps: float
    shard: Shard

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shard, wide = self.shard, x.float()
        own = shard.rank * self.groups // shard.size
        means = wide.new_zeros(len(x), self.groups)
        means[:, own] = wide.square().mean(-1)
        mean = summed(means, shard.collectives)[:, own, None] * (self.groups / shard.size)
        return (self.weight * (wide * torch.rsqrt(mean + self.eps))).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Mamba2Layer:
    """A Mamba-2 layer. With `norm` its state space has no norm: this one follows it."""

    index: int
    input: Linear
    state_space: StateSpace
    output: Linear
    shape: Mamba2Shape
    norm: JoinedNorm | None = None

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        shape = self.shape
        widths = [shape.width, shape.channels, shape.heads]
        gate, mixed, steps = torch.split(self.input(x), widths, dim=-1)
        found = self.state_space(mixed, gate, steps, self.index, step.memory)
        return self.output(found if self.norm is None else self.norm(found))
