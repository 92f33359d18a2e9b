"""A matrix of 4-bit floats (e2m1) that share a power of 2 in blocks: MXFP4 of the OCP Microscaling
formats. Twice an e2m1 number is an integer, so integers represent it exactly."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .quantized_weight import QuantizedWeight

# Inputs of a block.
BLOCK = 32
# Twice the values of codes 0 to 7; codes from 8 on are the negatives.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
# The integer that represents 0.
ZERO = max(DOUBLED)
# The bias of stored exponents, which makes them non-negative.
BIAS = 127


@dataclass(frozen=True, slots=True)
class MXFP4Weight:
    """weight[o, i] = number * 2^(scales[o, i // 32] - 127).

    blocks  uint8 [out, in / 32, 16]: e2m1 codes, the first of two in the low half
    scales  uint8 [out, in / 32]
    """

    blocks: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * BLOCK

    def rows(self, start: int, stop: int | None, step: int = 1) -> "MXFP4Weight":
        return MXFP4Weight(self.blocks[start:stop:step], self.scales[start:stop:step])

    def can_cut(self, start: int, stop: int) -> bool:
        """Whether inputs [start, stop) are whole blocks."""
        return not (start % BLOCK or stop % BLOCK)

    def columns(self, start: int, stop: int) -> "MXFP4Weight":
        """Inputs [start, stop), for which `can_cut` is true."""
        own = slice(start // BLOCK, stop // BLOCK)
        return MXFP4Weight(self.blocks[:, own], self.scales[:, own])

    def codes(self) -> QuantizedWeight:
        """Carries the codes in a QuantizedWeight, although they are not integers."""
        codes = torch.stack((self.blocks & 15, self.blocks >> 4), dim=-1).flatten(1)
        scales = torch.exp2(self.scales.float() - BIAS)
        return QuantizedWeight(codes, scales, torch.zeros_like(scales), None, 4)

    def quantized(self) -> QuantizedWeight:
        """Represents the same numbers exactly as integers."""
        coded = self.codes()
        numbers = (*(ZERO + one for one in DOUBLED), *(ZERO - one for one in DOUBLED))
        table = torch.tensor(numbers, dtype=torch.uint8, device=coded.values.device)
        values = table[coded.values.int()]
        return QuantizedWeight(
            values, coded.scales / 2, torch.full_like(coded.scales, ZERO), None, 8
        )

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]"""
        return self.quantized().dequantize()


def stack(parts: Sequence[MXFP4Weight]) -> MXFP4Weight:
    """Stacks the parts' outputs."""
    return MXFP4Weight(
        torch.cat([part.blocks for part in parts]), torch.cat([part.scales for part in parts])
    )
