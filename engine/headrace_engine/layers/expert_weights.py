"""The stacked matrices of a mixture's experts, for products of all experts at once.

Reads them expert by expert, in the order of a checkpoint. Experts whose matrices cannot be stacked
(different groups of scales, different orders of inputs) get layers of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from ..checkpoints.config import ExpertsConfig
from .feed_forward import FeedForward, SharedExpert
from .float8_weight import Float8Weight
from .layers import Linear
from .mxfp4_weight import MXFP4Weight
from .packed_weights import (
    GroupedPackedWeight,
    PackedWeight,
    PackedWeightStack,
    pack_mxfp4,
    pack_quantized,
)
from .quantized_weight import QuantizedWeight, round_weight

# Groups of inputs with scales must be multiples of this size.
GROUP_MULTIPLE = 64
# Names of the matrices that are stacked in one.
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """values [E, out, in], bias [E, out]. 8-bit floats have scales float32 [E, out, groups], of
    `group` inputs each; other dtypes have None."""

    values: torch.Tensor
    scales: torch.Tensor | None = None
    group: int = 0
    bias: torch.Tensor | None = None

    @property
    def own_group(self) -> int:
        """The number of inputs that share a scale; 0 if all inputs of an output share one, or there
        is none."""
        return self.group if self.scales is not None and self.scales.shape[2] > 1 else 0

    @property
    def outputs(self) -> int:
        return self.values.shape[1]

    @property
    def inputs(self) -> int:
        return self.values.shape[2]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """gate_up [E, 2 I, H], gates first; down [E, H, I]."""

    gate_up: GroupedWeight | GroupedPackedWeight
    down: GroupedWeight | GroupedPackedWeight

    def with_biases(self, gate_up: torch.Tensor, down: torch.Tensor) -> "ExpertWeights":
        """Adds gate_up [E, 2 I] and down [E, H]."""
        return ExpertWeights(replace(self.gate_up, bias=gate_up), replace(self.down, bias=down))


@dataclass(frozen=True, slots=True)
class MixtureParts:
    """A mixture's parts. Its MLPs are gated by SiLU, by GELU's tanh approximation with `gelu`, or
    as `config` says. `correction` float32 [E] as for choose_experts."""

    router: Linear
    weights: ExpertWeights
    shared: SharedExpert | None
    config: ExpertsConfig
    gelu: bool = False
    correction: torch.Tensor | None = None


@runtime_checkable
class MixtureOps(Protocol):
    """Operators that make mixtures of experts themselves."""

    def mixture(self, parts: MixtureParts) -> FeedForward: ...


class MatrixReader(Protocol):
    """Reads matrices by names; several names are stacked. See WeightReader."""

    @property
    def device(self) -> torch.device: ...

    def stack(self, names: Names) -> torch.Tensor: ...

    def quantized(self, names: Names) -> QuantizedWeight | None: ...

    def mxfp4(self, names: Names) -> MXFP4Weight | None: ...

    def float8(self, names: Names) -> Float8Weight | None: ...


def read_experts(
    reader: MatrixReader, experts: Sequence[tuple[Names, Names]], float8: bool
) -> ExpertWeights | None:
    """Stacks experts, each given by its names of (gate and up, down). `float8`: 8-bit floats keep
    their dtype; otherwise they are converted to the reader's dtype. None if the matrices cannot be
    stacked, or are quantised to integers."""
    gate_up, down = (_Stack(reader, len(experts), float8) for _ in range(2))
    for index, (upper, lower) in enumerate(experts):
        if not (gate_up.take(index, upper) and down.take(index, lower)):
            return None
    return ExpertWeights(gate_up.made(), down.made())


def read_packed_weights(
    reader: MatrixReader, experts: Sequence[tuple[Names, Names]], quantize: bool
) -> ExpertWeights | None:
    """Like read_experts, for matrices quantised to integers; with `quantize` floats are rounded to
    8 bits."""
    stacks = PackedWeightStack(len(experts)), PackedWeightStack(len(experts))
    for names in experts:
        for stack, own in zip(stacks, names, strict=True):
            packed = _packed(reader, own, quantize)
            if packed is None or not stack.take(packed):
                return None
    return ExpertWeights(stacks[0].made(), stacks[1].made())


def _packed(reader: MatrixReader, names: Names, quantize: bool) -> PackedWeight | None:
    floats = reader.mxfp4(names)
    if floats is not None:
        return pack_mxfp4(floats, reader.device)
    found = reader.quantized(names)
    if found is None and quantize:
        found = round_weight(reader.stack(names))
    return None if found is None else pack_quantized(found, reader.device)


class _Stack:
    """Fills a GroupedWeight, one expert after the other."""

    def __init__(self, reader: MatrixReader, count: int, float8: bool) -> None:
        self._reader, self._count, self._float8 = reader, count, float8
        self._made: GroupedWeight | None = None

    def made(self) -> GroupedWeight:
        assert self._made is not None, "a mixture has an expert"
        return self._made

    def take(self, index: int, names: Names) -> bool:
        """Stacks a matrix and returns True; False if it differs in kind from those before it."""
        found = self._read(names)
        if found is None:
            return False
        if self._made is None:
            self._made = self._room(found)
        made = self._made
        if (made.values.dtype, made.group) != (found.values.dtype, found.group):
            return False
        made.values[index].copy_(found.values)
        if made.scales is not None and found.scales is not None:
            made.scales[index].copy_(found.scales)
        return True

    def _read(self, names: Names) -> GroupedWeight | None:
        """Reads one expert's matrix, without the first dimension."""
        found = self._reader.float8(names) if self._float8 else None
        if found is not None:
            grouped = found.scales.shape[1] > 1
            unfit = grouped and found.group % GROUP_MULTIPLE
            return None if unfit else GroupedWeight(found.values, found.scales, found.group)
        if self._reader.quantized(names) is not None:
            return None
        return GroupedWeight(self._reader.stack(names))

    def _room(self, first: GroupedWeight) -> GroupedWeight:
        def room(part: torch.Tensor) -> torch.Tensor:
            shape = (self._count, *part.shape)
            return torch.empty(shape, dtype=part.dtype, device=self._reader.device)

        scales = None if first.scales is None else room(first.scales)
        return GroupedWeight(room(first.values), scales, first.group)
