"""Mamba-2 layers, https://arxiv.org/abs/2405.21060."""

from dataclasses import dataclass
from math import inf

import torch
from torch.nn import functional as F

from ...checkpoints.fields import Fields
from ...core.recurrent_state import StateTensor
from ...layers.layers import Linear
from ...operators.recurrences import state_space
from ...operators.recurrent import Convolution, scan
from .layers import HybridStep, conv_state
from .tensors import Tensors

# As JSON has it, and as transformers writes it.
_NO_LIMITS = ([0.0, inf], [0.0, {"__float__": "Infinity"}])


def check_steps(fields: Fields) -> None:
    """Raises ConfigError if time steps are limited."""
    if fields.get("time_step_limit", _NO_LIMITS[0]) not in _NO_LIMITS:
        raise fields.error("time_step_limit", "[0, Infinity]")


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Heads of a layer; `groups` of them share the inputs B and C of `state_size`."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    window: int

    @classmethod
    def of(cls, fields: Fields, width: int) -> "Mamba2Shape":
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
        return cls(heads, dim, groups, state_size, fields.integer("mamba_d_conv", 4))

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
class Mamba2Layer:
    """A Mamba-2 layer whose gate is applied before the norm, or after it with `norm_first`.

    `a_log`, `dt_bias` and `skip` [H] are float32; `norm` [H * P] is over each group of heads; None:
    there is no norm.
    """

    index: int
    input: Linear
    convolution: Convolution
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor | None
    eps: float
    output: Linear
    shape: Mamba2Shape
    norm_first: bool = False

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        shape = self.shape
        gate, mixed, dt = torch.split(
            self.input(x), [shape.width, shape.channels, shape.heads], dim=-1
        )
        steps = F.softplus(dt.float() + self.dt_bias)
        found = scan(self.index, step.memory, (mixed, steps), self._advance)
        gate = F.silu(gate.float())
        found = self._normed(found) * gate if self.norm_first else self._normed(found * gate)
        return self.output(found.to(x.dtype))

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm is None:
            return x
        grouped = x.view(len(x), self.shape.groups, -1)
        scale = torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.norm * (grouped * scale).view(len(x), -1)

    def _advance(
        self, rows: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        shape, count = self.shape, len(rows[0])
        convolved, window = self.convolution(rows[0], state[0])
        inner = shape.groups * shape.state_size
        values, b, c = torch.split(F.silu(convolved).float(), [shape.width, inner, inner], dim=-1)
        repeats = shape.heads // shape.groups
        grouped = (count, shape.groups, shape.state_size)
        outputs, matrix = state_space(
            values.reshape(count, shape.heads, shape.head_dim),
            rows[1],
            -self.a_log.exp(),
            b.reshape(grouped).repeat_interleave(repeats, dim=1),
            c.reshape(grouped).repeat_interleave(repeats, dim=1),
            self.skip,
            state[1],
        )
        return outputs.flatten(1), (window, matrix)


def read_mamba2(
    tensors: Tensors,
    prefix: str,
    index: int,
    hidden: int,
    shape: Mamba2Shape,
    eps: float,
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
    return Mamba2Layer(
        index=index,
        input=tensors.linear({f"{prefix}in_proj": joint}, hidden, proj_bias),
        convolution=Convolution(weight[:, 0], bias),
        a_log=vectors[1],
        dt_bias=vectors[0],
        skip=vectors[2],
        norm=tensors.tensor(f"{prefix}norm.weight", width) if normed else None,
        eps=eps,
        output=tensors.linear({f"{prefix}out_proj": hidden}, width, output_bias),
        shape=shape,
        norm_first=norm_first,
    )
