"""Mamba layers, https://arxiv.org/abs/2312.00752, with and without norms of time steps, B and C."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch

from ...checkpoints.tensor_files import Shape
from ...core.recurrent_state import StateTensor
from ...layers.layers import Linear
from ...operators.base import Ops
from ...operators.recurrent import (
    Convolution,
    MambaWeights,
    SelectiveScan,
    conv_state,
    recurrences_of,
)
from ..parallel import Shard
from .family import Family
from .layers import HybridStep
from .ranks import Division, SummedLinear
from .tensors import Tensors

# The norms of time steps, B and C: none; without weights; or with those of the checkpoint.
SelectionNorms = Literal["none", "unit", "stored"]


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
    """A Mamba layer. `norms` are those of time steps, B and C, or empty."""

    index: int
    input: Linear
    scan: SelectiveScan
    selection: Linear
    norms: tuple[torch.Tensor, ...]
    eps: float
    steps: Linear
    output: Linear
    shape: MambaShape
    ops: Ops

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        values, gate = self.input(x).chunk(2, dim=-1)
        return self.output(self.scan(values, gate, self._select, self.index, step.memory))

    def _select(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        selected = torch.split(self.selection(values), self.shape.split, dim=-1)
        steps, b, c = (part.contiguous() for part in selected)
        if self.norms:
            steps, b, c = (
                self.ops.rms_norm(part, norm, self.eps)
                for part, norm in zip((steps, b, c), self.norms, strict=True)
            )
        return self.steps(steps), b, c


class WithMamba(Family):
    """A family with Mamba layers, whose tensors' names have `mamba_part`. `width_name` says what
    their number of channels is in config.json."""

    mamba_part: ClassVar[str] = ".mamba."
    width_name: ClassVar[str] = "mamba_expand * hidden_size"
    mamba: MambaShape

    def counts(self) -> dict[str, int]:
        return {**super().counts(), self.width_name: self.mamba.width}

    def divided(self, shard: Shard) -> Self:
        part = super().divided(shard)
        part.mamba = replace(self.mamba, width=self.mamba.width // shard.size)
        return part

    def division(self, name: str, whole: Shape) -> Division | None:
        if self.mamba_part not in name:
            return super().division(name, whole)
        width = self.mamba.width
        if ".in_proj." in name:
            return Division(0, (width, width))
        if ".x_proj." in name:
            return Division(1, (width,))
        by_channel = (".conv1d.weight", ".conv1d.bias", ".dt_proj.weight", ".dt_proj.bias")
        if name.endswith((*by_channel, ".A_log", ".D")):
            return Division(0, (width,))
        return super().division(name, whole)

    def mamba_layer(
        self,
        tensors: Tensors,
        ops: Ops,
        prefix: str,
        index: int,
        *,
        eps: float,
        conv_bias: bool,
        proj_bias: bool,
        norms: SelectionNorms = "stored",
    ) -> MambaLayer:
        """Reads the layer whose tensors' names begin with `prefix`, number `index` of the recurrent
        ones. `eps` is that of `norms`."""
        shape, hidden, shard = self.mamba, self.hidden, self.shard
        width = shape.width
        weight = tensors.tensor(f"{prefix}conv1d.weight", width, 1, shape.window)
        bias = tensors.tensor(f"{prefix}conv1d.bias", width) if conv_bias else None
        selection = tensors.linear({f"{prefix}x_proj": sum(shape.split)}, width, exact=True)
        steps = tensors.linear({f"{prefix}dt_proj": width}, shape.rank, True, exact=True)
        weights = MambaWeights(
            convolution=Convolution(weight[:, 0], bias),
            a_log=tensors.float32(f"{prefix}A_log", width, shape.state_size),
            skip=tensors.float32(f"{prefix}D", width),
        )
        return MambaLayer(
            index=index,
            input=tensors.linear({f"{prefix}in_proj": 2 * width}, hidden, proj_bias),
            scan=recurrences_of(ops).selective_scan(weights),
            selection=selection if shard is None else SummedLinear(selection, shard),
            norms=_norms(tensors, prefix, shape, norms),
            eps=eps,
            steps=steps,
            output=tensors.linear({f"{prefix}out_proj": hidden}, width, proj_bias),
            shape=shape,
            ops=ops,
        )


def _norms(
    tensors: Tensors, prefix: str, shape: MambaShape, kind: SelectionNorms
) -> tuple[torch.Tensor, ...]:
    if kind == "none":
        return ()
    if kind == "unit":
        return tuple(tensors.place(torch.ones(size)) for size in shape.split)
    parts = zip(("dt", "b", "c"), shape.split, strict=True)
    return tuple(tensors.tensor(f"{prefix}{name}_layernorm.weight", size) for name, size in parts)
