"""Random weights, made on the device, for measuring shapes without their files.

vLLM's `load_format` dummy. Reads only the folder's config.json; outputs are meaningless.
"""

from collections.abc import Collection, Container, Iterable, Mapping
from typing import Protocol, runtime_checkable
from zlib import crc32

import torch

from ...layers.float8_weight import Float8Weight, round_weight
from ...layers.quantized_weight import QuantizedWeight, contiguous_groups, stack
from ..layout import plain_layout
from ..parallel import WeightCuts
from ..quantization.fp8_on_load import is_linear
from .weights import Shape, WeightReader

# The standard deviation that transformers' configurations use for initial weights.
DEVIATION = 0.02


@runtime_checkable
class Grouped(Protocol):
    """Integers of `bits` with a scale for each `group_size` inputs; -1: one for all."""

    bits: int
    group_size: int


class RandomReader(WeightReader):
    """Makes the same numbers for the same name, shape and device. Norms are 1."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        cuts: WeightCuts | None = None,
        float8: bool = False,
        grouped: Grouped | None = None,
    ) -> None:
        """Linear layers are 8-bit floats with `float8`, and integers as `grouped` describes."""
        self.dtype, self.device, self._locate = dtype, device, plain_layout
        self._format, self._cuts, self._float8 = None, cuts, float8
        self._grouped = grouped
        self._expected: Mapping[str, Shape] = {}

    def check(self, expected: Mapping[str, Shape], ignored: Collection[str] = ()) -> None:
        """Does nothing: without files, no tensor can be missing or superfluous."""
        self._expected = expected

    def quantized(self, names: Iterable[str]) -> QuantizedWeight | None:
        wanted, kind = list(names), self._grouped
        if kind is None or not _are_linear(wanted):
            return None
        whole = [(name, self._random(name, kind)) for name in wanted]
        cuts = self._cuts
        return stack([one if cuts is None else cuts.quantized(name, one) for name, one in whole])

    def _random(self, name: str, kind: Grouped) -> QuantizedWeight:
        outputs, inputs = self._expected[name]
        count = 1 if kind.group_size == -1 else -(-inputs // kind.group_size)
        end = 1 << kind.bits
        values = torch.empty(outputs, inputs, dtype=torch.uint8, device=self.device)
        # Symmetric around the middle.
        values.random_(1, end, generator=self._generator(name))
        scale = torch.tensor(DEVIATION * 12**0.5 / end).half().item()  # rounded as in checkpoints
        scales = torch.full((outputs, count), scale, device=self.device)
        zeros = torch.full_like(scales, end / 2)
        groups = None if inputs % count == 0 else contiguous_groups(inputs, count)
        return QuantizedWeight(values, scales, zeros, groups, kind.bits)

    def blocks(self, names: Iterable[str], kinds: Container[str]) -> None:
        """None: no matrix has the blocks of a GGUF file."""

    def float8(self, names: Iterable[str]) -> Float8Weight | None:
        wanted = list(names)
        if not self._float8 or not _are_linear(wanted):
            return None
        return round_weight(self.stack(wanted))

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._expected[name]
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 1 and "norm" in name:
            return made.fill_(1.0)
        return made.normal_(0.0, DEVIATION, generator=self._generator(name))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(crc32(name.encode()))


def _are_linear(names: Iterable[str]) -> bool:
    return all(is_linear(name.removesuffix(".weight")) for name in names)
