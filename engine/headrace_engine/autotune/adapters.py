"""Measures the LoRA products of decodes: how inputs are split into chunks, and how many outputs one
program computes. Uses layers of random adapters; rows use their slots in turn."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from ..device.transfer import Array
from ..kernels.triton.launch import LoRALaunch, LoRALaunches, lora_candidates, lora_launch
from ..lora.batch import LoRALimits
from ..lora.linear import LoRALinear
from ..lora.shapes import LayerShapes, LinearShape, without_experts
from ..lora.tiles import TiledProducts, TiledRows
from ..operators.triton import TritonOps
from .autotuner import Autotuner, Run
from .layers import ROTATED_BYTES, dtype_name

# A linear layer, its rows x, and the y to which the product is added.
LinearInputs = tuple[LoRALinear, torch.Tensor, torch.Tensor]


class AdapterTuning:
    """Tunes adapters on layers of `shapes`, in `slots` slots and with ranks up to `rank`. The
    layers are made once; they fill the memory that measurements read in turn."""

    def __init__(
        self,
        ops: TritonOps,
        shapes: Sequence[LayerShapes],
        slots: int,
        rank: int,
        like: torch.Tensor,
    ) -> None:
        self._ops, self._shapes = ops, without_experts(shapes)
        self._slots, self._rank, self._like = slots, rank, like
        self._linears: list[LoRALinear] = []

    def tune(self, tuner: Autotuner, rows: int) -> None:
        """Measures up to `rows` rows, one of LORA_BOUNDS."""
        if not self._linears:
            self._linears = self._made()
        inputs = [self._inputs(linear, rows) for linear in self._linears]
        if not inputs:
            return
        named = {_name(one): one for one in lora_candidates(self._default(rows))}
        runs: dict[str, Run] = {
            name: partial(_run, inputs, self.tiled(rows, one)) for name, one in named.items()
        }
        kind = dtype_name(self._like.dtype)
        sizes = " ".join(dict.fromkeys(_size(linear.shape) for linear in self._linears))
        what = f"adapters {self._slots} of rank {self._rank} on {sizes}, {kind}, rows {rows}"
        chosen = named[tuner.choose(what, runs, self._read_bytes(rows))]
        others = [one for one in self._ops.lora_launches.few if one[0] != rows]
        few = sorted((*others, (rows, chosen)), key=lambda one: one[0])
        self._ops.lora_launches = LoRALaunches(tuple(few))

    def _default(self, rows: int) -> LoRALaunch:
        return lora_launch(self._like.element_size(), rows)

    def _made(self) -> list[LoRALinear]:
        """Makes layers until the memory is filled, at least all of one decoder layer."""
        made: list[LoRALinear] = []
        for layer in self._shapes:
            if sum(map(_bytes, made)) >= ROTATED_BYTES:
                break
            made += [self._linear(shape) for shape in layer.values()]
        return made

    def _linear(self, shape: LinearShape) -> LoRALinear:
        linear = LoRALinear(shape, self._slots, self._rank, self._like.dtype, self._like.device)
        for matrix in (linear.down, linear.up):
            matrix.normal_(0.0, 0.02)
        ends = torch.arange(1, len(shape.parts) + 1, dtype=torch.int32) * self._rank
        linear.ends.copy_(ends.expand_as(linear.ends))
        return linear

    def _inputs(self, linear: LoRALinear, rows: int) -> LinearInputs:
        x = self._like.new_empty(rows, linear.shape.inputs).normal_()
        return linear, x, self._like.new_zeros(rows, linear.shape.outputs)

    def tiled(self, rows: int, launch: LoRALaunch) -> TiledRows:
        """Makes `rows` rows that use the slots in turn."""
        limits = LoRALimits(self._slots, rows, self._like.element_size())
        products = TiledProducts(limits, self._move, measured=LoRALaunches(((rows, launch),)))
        return products.rows(np.arange(rows) % self._slots)

    def _move(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self._like.device) for array in arrays]

    def _read_bytes(self, rows: int) -> int:
        used = min(rows, self._slots) / self._slots
        return round(used * sum(map(_bytes, self._linears)))


def _run(inputs: Sequence[LinearInputs], rows: TiledRows) -> torch.Tensor:
    """Adds to all layers' results and returns the first one's."""
    inputs[0][2].zero_()
    for linear, x, y in inputs:
        rows.add(linear, x, y)
    return inputs[0][2]


def _bytes(linear: LoRALinear) -> int:
    return sum(one.numel() * one.element_size() for one in (linear.down, linear.up))


def _size(shape: LinearShape) -> str:
    return f"{shape.outputs}x{shape.inputs}"


def _name(launch: LoRALaunch) -> str:
    return f"chunks of {launch.chunk}, {launch.chunks} at most, outputs {launch.outputs}"
