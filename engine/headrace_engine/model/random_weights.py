"""Weights that are drawn on the device instead of read, for measuring shapes without their files.

vLLM's `load_format` dummy. Only the folder's config.json is looked at; outputs mean nothing.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol, runtime_checkable
from zlib import crc32

import torch

from .layout import plain_layout
from .parallel import WeightCuts
from .quantization.float8_weight import Float8Weight, round_weight
from .quantization.fp8_on_load import is_linear
from .quantization.weight import QuantizedWeight, stack, usual_groups
from .weights import Shape, WeightReader

# The standard deviation that transformers' configurations begin with.
DEVIATION = 0.02


@runtime_checkable
class Grouped(Protocol):
    """Whole numbers of `bits` with a scale for each `group_size` inputs; -1: one for all."""

    bits: int
    group_size: int


class RandomReader(WeightReader):
    """The same numbers for the same name, shape and device. Norms are 1."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        cuts: WeightCuts | None = None,
        float8: bool = False,
        grouped: Grouped | None = None,
    ) -> None:
        """Linear layers are in 8-bit floats with `float8`, and in whole numbers as `grouped` has
        them."""
        self.dtype, self.device, self._locate = dtype, device, plain_layout
        self._format, self._cuts, self._float8 = None, cuts, float8
        self._grouped = grouped
        self._expected: Mapping[str, Shape] = {}

    def check(self, expected: Mapping[str, Shape], ignored: Collection[str] = ()) -> None:
        """Nothing is stored, so nothing can be missing or superfluous."""
        self._expected = expected

    def quantized(self, names: Iterable[str]) -> QuantizedWeight | None:
        wanted, kind = list(names), self._grouped
        if kind is None or not _are_linear(wanted):
            return None
        whole = [(name, self._levels(name, kind)) for name in wanted]
        cuts = self._cuts
        return stack([one if cuts is None else cuts.quantized(name, one) for name, one in whole])

    def _levels(self, name: str, kind: Grouped) -> QuantizedWeight:
        outputs, inputs = self._expected[name]
        count = 1 if kind.group_size == -1 else -(-inputs // kind.group_size)
        end = 1 << kind.bits
        levels = torch.empty(outputs, inputs, dtype=torch.uint8, device=self.device)
        # As much below the middle as above it.
        levels.random_(1, end, generator=self._generator(name))
        scale = torch.tensor(DEVIATION * 12**0.5 / end).half().item()  # as checkpoints have them
        scales = torch.full((outputs, count), scale, device=self.device)
        zeros = torch.full_like(scales, end / 2)
        groups = None if inputs % count == 0 else usual_groups(inputs, count)
        return QuantizedWeight(levels, scales, zeros, groups, kind.bits)

    def float8(self, names: Iterable[str]) -> Float8Weight | None:
        wanted = list(names)
        if not self._float8 or not _are_linear(wanted):
            return None
        return round_weight(self.stack(wanted))

    def _load(self, name: str) -> torch.Tensor:
        shape = self._expected[name]
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 1 and "norm" in name:
            return made.fill_(1.0)
        return made.normal_(0.0, DEVIATION, generator=self._generator(name))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(crc32(name.encode()))


def _are_linear(names: Iterable[str]) -> bool:
    return all(is_linear(name.removesuffix(".weight")) for name in names)
