"""A matrix of small integers with a scale for each group of inputs, and how it is unpacked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

WORD_BITS = 32
# The 8-bit integers that represent 0 and the largest number of an output.
MIDDLE, LARGEST = 128, 127
# The smallest scale: an output of zeros must not divide by 0.
SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g], where g is the group of input i.

    values  uint8 [out, in]
    scales  float32 [out, groups]
    zeros   float32 [out, groups]
    groups  int64 [in], or None if groups are successive runs of in / groups inputs
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor | None
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def rows(self, start: int, stop: int | None, step: int = 1) -> "QuantizedWeight":
        chosen = slice(start, stop, step)
        return replace(
            self,
            values=self.values[chosen],
            scales=self.scales[chosen],
            zeros=self.zeros[chosen],
        )

    def can_cut(self, start: int, stop: int) -> bool:
        """Whether inputs [start, stop) are whole groups, or every input names its group."""
        inputs, count = self.shape[1], self.scales.shape[1]
        size = inputs // count
        return self.groups is not None or count == 1 or not (start % size or stop % size)

    def columns(self, start: int, stop: int) -> "QuantizedWeight":
        """Inputs [start, stop), for which `can_cut` is true."""
        values = self.values[:, start:stop].contiguous()
        if self.groups is not None:
            return replace(self, values=values, groups=self.groups[start:stop])
        count = self.scales.shape[1]
        if count == 1:
            return replace(self, values=values)
        size = self.shape[1] // count
        own = slice(start // size, stop // size)
        return replace(self, values=values, scales=self.scales[:, own], zeros=self.zeros[:, own])

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]"""
        values = self.values.float()
        if self.groups is not None:
            return (values - self.zeros[:, self.groups]) * self.scales[:, self.groups]
        out, count = self.scales.shape
        grouped = values.view(out, count, -1)
        return ((grouped - self.zeros[..., None]) * self.scales[..., None]).view(out, -1)


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Stacks the parts' outputs; None if their inputs are grouped in different ways."""
    first = parts[0]
    for part in parts[1:]:
        same = part.bits == first.bits and part.scales.shape[1] == first.scales.shape[1]
        if not same or not _same_groups(part.groups, first.groups):
            return None
    return replace(
        first,
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part.zeros for part in parts]),
    )


def round_weight(weight: torch.Tensor) -> QuantizedWeight:
    """Rounds [out, in] to 8 bits on its device, symmetric, with a scale for each output."""
    scales = weight.abs().amax(dim=1, keepdim=True).float().clamp_min(SMALLEST) / LARGEST
    values = (weight / scales).round_().add_(MIDDLE).to(torch.uint8)
    return QuantizedWeight(values, scales, torch.full_like(scales, MIDDLE), None, 8)


def _same_groups(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def unpack_columns(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks int32 [R, C], n numbers a word, the first in the lowest bits: uint8 [R, C * n]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=packed.device)
    numbers = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.to(torch.uint8).flatten(1)


def unpack_rows(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Like `unpack_columns`, if a word holds numbers of successive rows: [R * n, C]."""
    return unpack_columns(packed.T.contiguous(), bits).T.contiguous()


def contiguous_groups(inputs: int, count: int) -> torch.Tensor:
    """int64 [inputs]: contiguous groups of one size; the last may be smaller."""
    return torch.arange(inputs) // -(-inputs // count)
