"""A matrix in the blocks of a GGUF file's quantised types, and how it becomes floats."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from .quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

# Elements that are in memory as float32 at a time.
CHUNK = 1 << 22
# Types whose blocks are a float16 scale and integers: bits, bytes of a block, zero point.
_INTEGERS = {"Q8_0": (8, 34, 128), "Q4_0": (4, 18, 8)}


@dataclass(frozen=True)
class GGUFWeight:
    """Rows of blocks of ggml's type `kind`: uint8 [out, bytes of a row of `inputs` elements]."""

    blocks: torch.Tensor
    kind: str
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.inputs

    def rows(self, start: int, stop: int | None, step: int = 1) -> "GGUFWeight":
        return replace(self, blocks=self.blocks[start:stop:step])

    def chosen(self, rows: torch.Tensor) -> "GGUFWeight":
        """The rows with these numbers."""
        return replace(self, blocks=self.blocks[rows])

    def quantized(self) -> QuantizedWeight | None:
        """The same values as integers in groups of 32 with one zero point; None for other types."""
        if self.kind not in _INTEGERS:
            return None
        bits, size, zero = _INTEGERS[self.kind]
        blocks = self.blocks.reshape(len(self.blocks), -1, size)
        scales, stored = blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2:]
        if bits == 8:
            values = stored ^ 128  # from two's complement to numbers above a zero point of 128
        else:
            values = torch.cat((stored & 15, stored >> 4), dim=-1)
        zeros = torch.full(scales.shape, float(zero))
        return QuantizedWeight(values.flatten(1).contiguous(), scales.float(), zeros, None, bits)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[out, in]: exact in float32, and rounded from there."""
        from gguf.quants import dequantize  # only GGUF files need the package

        whole = torch.empty(self.shape, dtype=dtype)
        step = max(1, CHUNK // self.inputs)
        for start in range(0, len(whole), step):
            part = self.blocks[start : start + step].contiguous().numpy()
            whole[start : start + step] = torch.from_numpy(dequantize(part, self._type))
        return whole

    @cached_property
    def _type(self) -> "GGMLQuantizationType":
        from gguf.constants import GGMLQuantizationType

        return GGMLQuantizationType[self.kind]
