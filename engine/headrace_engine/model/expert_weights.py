"""The matrices of a mixture's experts, next to each other, for products of all experts at once.

Reads them expert by expert, as they lie in a checkpoint. Experts whose matrices cannot be put
together (scales of unlike groups, inputs in unlike orders) are left to layers of their own.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from .config import ExpertsConfig
from .feed_forward import FeedForward, SharedExpert
from .layers import Linear
from .packed_levels import GroupedLevels, LevelsStack, PackedLevels, pack_levels, pack_mxfp4
from .quantization.float8_weight import Float8Weight
from .quantization.mxfp4_weight import MXFP4Weight
from .quantization.weight import QuantizedWeight, round_weight

# Scales of groups of inputs are taken where the groups are multiples of so many.
GROUP_MULTIPLE = 64
# Names of the matrices that lie below each other in one.
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """values [E, out, in], bias [E, out]. 8-bit floats have scales float32 [E, out, groups], of
    `group` inputs each; others None."""

    values: torch.Tensor
    scales: torch.Tensor | None = None
    group: int = 0
    bias: torch.Tensor | None = None

    @property
    def own_group(self) -> int:
        """Inputs that have a scale of their own; 0: all of an output have one, or none."""
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

    gate_up: GroupedWeight | GroupedLevels
    down: GroupedWeight | GroupedLevels

    def with_biases(self, gate_up: torch.Tensor, down: torch.Tensor) -> "ExpertWeights":
        """gate_up [E, 2 I], down [E, H]."""
        return ExpertWeights(replace(self.gate_up, bias=gate_up), replace(self.down, bias=down))


@dataclass(frozen=True, slots=True)
class MixtureParts:
    """MLPs gated by SiLU, or with `gelu` by GELU's approximation by tanh, or as `config` says."""

    router: Linear
    weights: ExpertWeights
    shared: SharedExpert | None
    config: ExpertsConfig
    gelu: bool = False


@runtime_checkable
class OwnMixtures(Protocol):
    """Operators that bring mixtures of experts of their own."""

    def mixture(self, parts: MixtureParts) -> FeedForward: ...


class MatrixReader(Protocol):
    """Matrices by names, those of several names below each other; see WeightReader."""

    @property
    def device(self) -> torch.device: ...

    def stack(self, names: Names) -> torch.Tensor: ...

    def quantized(self, names: Names) -> QuantizedWeight | None: ...

    def mxfp4(self, names: Names) -> MXFP4Weight | None: ...

    def float8(self, names: Names) -> Float8Weight | None: ...


def read_experts(
    reader: MatrixReader, experts: Rows[tuple[Names, Names]], float8: bool
) -> ExpertWeights | None:
    """Of each expert's names of (gate and up, down). `float8`: 8-bit floats stay so; else they
    become the reader's dtype. None where the matrices cannot be put together, as those in whole
    numbers."""
    gate_up, down = (_Stack(reader, len(experts), float8) for _ in range(2))
    for index, (upper, lower) in enumerate(experts):
        if not (gate_up.take(index, upper) and down.take(index, lower)):
            return None
    return ExpertWeights(gate_up.made(), down.made())


def read_levels(
    reader: MatrixReader, experts: Rows[tuple[Names, Names]], quantize: bool
) -> ExpertWeights | None:
    """As read_experts, of matrices in whole numbers; with `quantize` those of floats are rounded to
    8 bits."""
    stacks = LevelsStack(len(experts)), LevelsStack(len(experts))
    for names in experts:
        for stack, own in zip(stacks, names, strict=True):
            packed = _packed(reader, own, quantize)
            if packed is None or not stack.take(packed):
                return None
    return ExpertWeights(stacks[0].made(), stacks[1].made())


def _packed(reader: MatrixReader, names: Names, quantize: bool) -> PackedLevels | None:
    floats = reader.mxfp4(names)
    if floats is not None:
        return pack_mxfp4(floats, reader.device)
    found = reader.quantized(names)
    if found is None and quantize:
        found = round_weight(reader.stack(names))
    return None if found is None else pack_levels(found, reader.device)


class _Stack:
    """Fills a GroupedWeight, an expert after the other."""

    def __init__(self, reader: MatrixReader, count: int, float8: bool) -> None:
        self._reader, self._count, self._float8 = reader, count, float8
        self._made: GroupedWeight | None = None

    def made(self) -> GroupedWeight:
        assert self._made is not None, "a mixture has an expert"
        return self._made

    def take(self, index: int, names: Names) -> bool:
        """Whether the matrix is of the kind of those before it, and is in its place now."""
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
        """One expert's, without the first dimension."""
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
