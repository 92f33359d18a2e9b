"""Mamba layers, https://arxiv.org/abs/2312.00752, with Jamba's norms of time steps, B and C."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ...core.recurrent_state import StateTensor
from ...layers.layers import Linear
from ...operators.base import Ops
from ...operators.recurrences import selective_scan
from ...operators.recurrent import Convolution, conv_state, scan
from .layers import HybridStep
from .tensors import Tensors


@dataclass(frozen=True, slots=True)
class MambaShape:
    """A layer of `width` channels, each with `state_size` elements of state. Time steps are made
    from `rank` elements."""

    width: int
    state_size: int
    rank: int
    window: int

    @property
    def split(self) -> list[int]:
        """The elements of time steps, B and C."""
        return [self.rank, self.state_size, self.state_size]

    def states(self, dtype: torch.dtype) -> tuple[StateTensor, StateTensor]:
        """The window of the convolution, and the state of each channel."""
        matrix = StateTensor((self.width, self.state_size), torch.float32)
        return conv_state(self.width, self.window, dtype), matrix


@dataclass(frozen=True, slots=True)
class MambaLayer:
    """A Mamba layer. `norms` are those of time steps, B and C; `a_log` [C, N] and `skip` [C] are
    float32."""

    index: int
    input: Linear
    convolution: Convolution
    selection: Linear
    norms: tuple[torch.Tensor, ...]
    eps: float
    steps: Linear
    a_log: torch.Tensor
    skip: torch.Tensor
    output: Linear
    shape: MambaShape
    ops: Ops

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        values, gate = self.input(x).chunk(2, dim=-1)
        found = scan(self.index, step.memory, (values,), self._advance)
        return self.output((found * F.silu(gate.float())).to(x.dtype))

    def _advance(
        self, rows: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        convolved, window = self.convolution(rows[0], state[0])
        values = F.silu(convolved)
        selected = torch.split(self.selection(values), self.shape.split, dim=-1)
        steps, b, c = (
            self.ops.rms_norm(part.contiguous(), norm, self.eps)
            for part, norm in zip(selected, self.norms, strict=True)
        )
        outputs, matrix = selective_scan(
            values.float(),
            F.softplus(self.steps(steps).float()),
            -self.a_log.exp(),
            b.float(),
            c.float(),
            self.skip,
            state[1],
        )
        return outputs, (window, matrix)


def read_mamba(
    tensors: Tensors,
    prefix: str,
    index: int,
    hidden: int,
    shape: MambaShape,
    eps: float,
    ops: Ops,
    *,
    conv_bias: bool,
    proj_bias: bool,
) -> MambaLayer:
    """Reads the layer whose tensors' names begin with `prefix`."""
    width = shape.width
    weight = tensors.tensor(f"{prefix}conv1d.weight", width, 1, shape.window)
    bias = tensors.tensor(f"{prefix}conv1d.bias", width) if conv_bias else None
    norms = zip(("dt", "b", "c"), shape.split, strict=True)
    return MambaLayer(
        index=index,
        input=tensors.linear({f"{prefix}in_proj": 2 * width}, hidden, proj_bias),
        convolution=Convolution(weight[:, 0], bias),
        selection=tensors.linear({f"{prefix}x_proj": sum(shape.split)}, width),
        norms=tuple(tensors.tensor(f"{prefix}{name}_layernorm.weight", n) for name, n in norms),
        eps=eps,
        steps=tensors.linear({f"{prefix}dt_proj": width}, shape.rank, True),
        a_log=tensors.float32(f"{prefix}A_log", width, shape.state_size),
        skip=tensors.float32(f"{prefix}D", width),
        output=tensors.linear({f"{prefix}out_proj": hidden}, width, proj_bias),
        shape=shape,
        ops=ops,
    )
