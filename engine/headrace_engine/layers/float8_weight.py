"""A matrix of 8-bit floats (e4m3) with scales, and the rounding of whole matrices to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
# The least scale, for rows of zeros: a scale must not be 0.
SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """weight[o, i] = values[o, i] * scales[o, i // group].

    values  e4m3 [out, in]
    scales  float32 [out, groups]; the last group may be smaller
    """

    values: torch.Tensor
    scales: torch.Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def own_group(self) -> int:
        """Inputs that share a scale; 0: all inputs of an output share one."""
        return self.group if self.scales.shape[1] > 1 else 0

    def rows(self, start: int, stop: int | None, step: int = 1) -> "Float8Weight":
        chosen = slice(start, stop, step)
        return replace(self, values=self.values[chosen], scales=self.scales[chosen])

    def can_cut(self, start: int, stop: int) -> bool:
        """Whether inputs [start, stop) are whole groups."""
        count = self.scales.shape[1]
        return count == 1 or not (start % self.group or stop % self.group)

    def columns(self, start: int, stop: int) -> "Float8Weight":
        """Inputs [start, stop), for which `can_cut` is true."""
        values = self.values[:, start:stop]
        if self.scales.shape[1] == 1:
            return Float8Weight(values, self.scales, stop - start)
        own = slice(start // self.group, -(-stop // self.group))
        return Float8Weight(values, self.scales[:, own], self.group)

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]"""
        if self.scales.shape[1] == 1:
            return self.values.float() * self.scales
        scales = self.scales.repeat_interleave(self.group, dim=1)
        return self.values.float() * scales[:, : self.shape[1]]


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [N, D] to e4m3; each row's scale, float32 [N, 1], comes from its largest number."""
    wide = x.float()
    scales = wide.abs().amax(dim=1, keepdim=True).clamp_min(SMALLEST) / LARGEST
    return (wide / scales).clamp(-LARGEST, LARGEST).to(FLOAT8), scales


def round_weight(weight: torch.Tensor) -> Float8Weight:
    """Rounds a whole matrix [out, in], with a scale for each output."""
    return Float8Weight(*round_rows(weight), group=weight.shape[1])


def stack(parts: Sequence[Float8Weight]) -> Float8Weight | None:
    """Stacks the parts' outputs; None if their inputs are grouped in different ways."""
    first = parts[0]
    if any(part.group != first.group for part in parts):
        return None
    # As bytes: torch cannot concatenate 8-bit floats on every device.
    values = torch.cat([part.values.view(torch.uint8) for part in parts])
    return Float8Weight(
        values.view(FLOAT8), torch.cat([part.scales for part in parts]), first.group
    )
