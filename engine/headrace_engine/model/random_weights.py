"""Weights that are drawn on the device instead of read, for measuring shapes without their files.

vLLM's `load_format` dummy. Only the folder's config.json is looked at; outputs mean nothing.
"""

from collections.abc import Collection, Iterable, Mapping
from zlib import crc32

import torch

from .layout import plain_layout
from .parallel import WeightCuts
from .quantization.float8_weight import Float8Weight, round_weight
from .quantization.fp8_on_load import is_linear
from .quantization.weight import QuantizedWeight
from .weights import Shape, WeightReader

# The standard deviation that transformers' configurations begin with.
DEVIATION = 0.02


class RandomReader(WeightReader):
    """The same numbers for the same name, shape and device. Norms are 1."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        cuts: WeightCuts | None = None,
        float8: bool = False,
    ) -> None:
        """With `float8` linear layers are in 8-bit floats."""
        self.dtype, self.device, self._locate = dtype, device, plain_layout
        self._format, self._cuts, self._float8 = None, cuts, float8
        self._expected: Mapping[str, Shape] = {}

    def check(self, expected: Mapping[str, Shape], ignored: Collection[str] = ()) -> None:
        """Nothing is stored, so nothing can be missing or superfluous."""
        self._expected = expected

    def quantized(self, names: Iterable[str]) -> QuantizedWeight | None:
        return None

    def float8(self, names: Iterable[str]) -> Float8Weight | None:
        wanted = list(names)
        if not self._float8 or not all(is_linear(name.removesuffix(".weight")) for name in wanted):
            return None
        return round_weight(self.stack(wanted))

    def _load(self, name: str) -> torch.Tensor:
        shape = self._expected[name]
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 1 and "norm" in name:
            return made.fill_(1.0)
        generator = torch.Generator(self.device).manual_seed(crc32(name.encode()))
        return made.normal_(0.0, DEVIATION, generator=generator)
