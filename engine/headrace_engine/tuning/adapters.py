"""Measures what LoRA adapters add to decodes: how inputs are cut into chunks, and the outputs that
a program takes. Over layers of random adapters, whose slots rows have by turns."""

from collections.abc import Sequence as Rows
from functools import partial

import numpy as np
import torch

from ..lora.batch import LoRALimits
from ..lora.linear import LoRALinear
from ..lora.shapes import LayerShapes, LinearShape, without_experts
from ..lora.tiles import TiledProducts, TiledRows
from ..model.triton_ops import TritonOps
from ..transfer import Array
from ..triton_kernels.launch import LoRALaunch, LoRALaunches, lora_candidates, lora_launch
from .autotuner import Autotuner, Run
from .layers import ROTATED_BYTES, dtype_name

# One linear layer with its rows x, and y to which is added.
Placed = tuple[LoRALinear, torch.Tensor, torch.Tensor]


class AdapterTuning:
    """Of adapters on layers of `shapes`, in so many slots and of ranks up to `rank`. Layers are
    made once, for as much memory as is read in turns."""

    def __init__(
        self,
        ops: TritonOps,
        shapes: Rows[LayerShapes],
        slots: int,
        rank: int,
        like: torch.Tensor,
    ) -> None:
        self._ops, self._shapes = ops, without_experts(shapes)
        self._slots, self._rank, self._like = slots, rank, like
        self._linears: list[LoRALinear] = []

    def tune(self, tuner: Autotuner, rows: int) -> None:
        """For up to `rows` of LORA_BOUNDS."""
        if not self._linears:
            self._linears = self._made()
        placed = [self._placed(linear, rows) for linear in self._linears]
        if not placed:
            return
        named = {_name(one): one for one in lora_candidates(self._default(rows))}
        runs: dict[str, Run] = {
            name: partial(_run, placed, self.tiled(rows, one)) for name, one in named.items()
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
        """Layer by layer, all of one at least."""
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

    def _placed(self, linear: LoRALinear, rows: int) -> Placed:
        x = self._like.new_empty(rows, linear.shape.inputs).normal_()
        return linear, x, self._like.new_zeros(rows, linear.shape.outputs)

    def tiled(self, rows: int, launch: LoRALaunch) -> TiledRows:
        """That many rows with the slots by turns."""
        limits = LoRALimits(self._slots, rows, self._like.element_size())
        products = TiledProducts(limits, self._move, measured=LoRALaunches(((rows, launch),)))
        return products.rows(np.arange(rows) % self._slots)

    def _move(self, arrays: Rows[Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self._like.device) for array in arrays]

    def _read_bytes(self, rows: int) -> int:
        used = min(rows, self._slots) / self._slots
        return round(used * sum(map(_bytes, self._linears)))


def _run(placed: Rows[Placed], rows: TiledRows) -> torch.Tensor:
    """Adds to all layers' results, and gives the first one's."""
    placed[0][2].zero_()
    for linear, x, y in placed:
        rows.add(linear, x, y)
    return placed[0][2]


def _bytes(linear: LoRALinear) -> int:
    return sum(one.numel() * one.element_size() for one in (linear.down, linear.up))


def _size(shape: LinearShape) -> str:
    return f"{shape.outputs}x{shape.inputs}"


def _name(launch: LoRALaunch) -> str:
    return f"chunks of {launch.chunk}, {launch.chunks} at most, outputs {launch.outputs}"
