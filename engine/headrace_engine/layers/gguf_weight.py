"""A matrix in the blocks of a GGUF file's quantised types, and how it becomes floats."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

# Elements that are in memory as float32 at a time.
CHUNK = 1 << 22


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
