"""A matrix of small whole numbers with a scale for each group of inputs, and how it is unpacked."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import torch

WORD_BITS = 32
# Levels of 8 bits that stand for 0, and for the largest number of an output.
MIDDLE, LARGEST = 128, 127
# No scale is smaller: an output of zeros stays so.
SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[o, i] = (levels[o, i] - zeros[o, g]) * scales[o, g], where g is the group of input i.

    levels  uint8 [out, in]
    scales  float32 [out, groups]
    zeros   float32 [out, groups]
    groups  int64 [in], or None where groups are runs of in / groups inputs, one after the other
    """

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor | None
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.levels.shape[0], self.levels.shape[1]

    def rows(self, start: int, stop: int | None, step: int = 1) -> "QuantizedWeight":
        chosen = slice(start, stop, step)
        return replace(
            self,
            levels=self.levels[chosen],
            scales=self.scales[chosen],
            zeros=self.zeros[chosen],
        )

    def can_cut(self, start: int, stop: int) -> bool:
        """Whether inputs [start, stop) are whole groups, or know their groups by themselves."""
        inputs, count = self.shape[1], self.scales.shape[1]
        size = inputs // count
        return self.groups is not None or count == 1 or not (start % size or stop % size)

    def columns(self, start: int, stop: int) -> "QuantizedWeight":
        """Inputs [start, stop), for which `can_cut` holds."""
        levels = self.levels[:, start:stop].contiguous()
        if self.groups is not None:
            return replace(self, levels=levels, groups=self.groups[start:stop])
        count = self.scales.shape[1]
        if count == 1:
            return replace(self, levels=levels)
        size = self.shape[1] // count
        own = slice(start // size, stop // size)
        return replace(self, levels=levels, scales=self.scales[:, own], zeros=self.zeros[:, own])

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]"""
        levels = self.levels.float()
        if self.groups is not None:
            return (levels - self.zeros[:, self.groups]) * self.scales[:, self.groups]
        out, count = self.scales.shape
        grouped = levels.view(out, count, -1)
        return ((grouped - self.zeros[..., None]) * self.scales[..., None]).view(out, -1)


def stack(parts: Rows[QuantizedWeight]) -> QuantizedWeight | None:
    """The parts below each other, or None where their inputs are grouped in different ways."""
    first = parts[0]
    for part in parts[1:]:
        same = part.bits == first.bits and part.scales.shape[1] == first.scales.shape[1]
        if not same or not _same_groups(part.groups, first.groups):
            return None
    return replace(
        first,
        levels=torch.cat([part.levels for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part.zeros for part in parts]),
    )


def round_weight(weight: torch.Tensor) -> QuantizedWeight:
    """[out, in] in 8 bits, symmetric with a scale for each output, where the weight lies."""
    scales = weight.abs().amax(dim=1, keepdim=True).float().clamp_min(SMALLEST) / LARGEST
    levels = (weight / scales).round_().add_(MIDDLE).to(torch.uint8)
    return QuantizedWeight(levels, scales, torch.full_like(scales, MIDDLE), None, 8)


def _same_groups(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def unpack_columns(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] of several numbers a word, the first in the lowest bits: uint8 [R, C * n]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    numbers = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.to(torch.uint8).flatten(1)


def unpack_rows(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """As `unpack_columns`, where the words hold numbers that lie below each other: [R * n, C]."""
    return unpack_columns(packed.T.contiguous(), bits).T.contiguous()


def usual_groups(inputs: int, count: int) -> torch.Tensor:
    """int64 [inputs]: groups of one size, one after the other; the last may be smaller."""
    return torch.arange(inputs) // -(-inputs // count)
