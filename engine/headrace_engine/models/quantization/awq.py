"""AWQ checkpoints (AutoAWQ's gemm version), https://arxiv.org/abs/2306.00978.

Numbers and zero points are packed along the outputs, eight a word, in the order of AWQ's kernels:
word w holds, from the lowest bits on, outputs 8 w + 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from ...checkpoints.fields import Fields
from ...checkpoints.tensor_files import Shape, TensorFiles
from ...layers.quantized_weight import QuantizedWeight, unpack_columns
from .base import FLOATS, TensorSpec

BITS, PER_WORD = 4, 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)


class AWQ:
    name: ClassVar[str] = "awq"
    integer_weights: ClassVar[bool] = True
    bits = BITS

    def __init__(self, fields: Fields) -> None:
        bits = "bits" if "bits" in fields else "w_bit"
        size = "group_size" if "group_size" in fields else "q_group_size"
        fields.require(bits, (BITS,), default=BITS)
        fields.require(size, GROUP_SIZES, default=128)
        fields.require("version", ("gemm", "GEMM"), default="gemm")
        fields.require("zero_point", (True,), default=True)
        self.group_size: int = fields.get(size, 128)
        # Each output's place in a word.
        self._places = torch.tensor([ORDER.index(place) for place in range(PER_WORD)])

    def stores(self, module: str, files: TensorFiles) -> bool:
        return f"{module}.qweight" in files.tensors

    def tensors(self, module: str, shape: Shape, files: TensorFiles) -> Mapping[str, TensorSpec]:
        out, inputs = shape
        groups, words = self._count(inputs), -(-out // PER_WORD)
        return {
            f"{module}.qweight": TensorSpec(((inputs, words),), ("I32",)),
            f"{module}.qzeros": TensorSpec(((groups, words),), ("I32",)),
            f"{module}.scales": TensorSpec(((groups, out),), FLOATS),
        }

    def read(self, module: str, shape: Shape, files: TensorFiles) -> QuantizedWeight:
        out = shape[0]
        values = self._unpack(files.load(f"{module}.qweight"))[:, :out]
        zeros = self._unpack(files.load(f"{module}.qzeros"))[:, :out]
        return QuantizedWeight(
            values=values.T.contiguous(),
            scales=files.load(f"{module}.scales").float().T.contiguous(),
            zeros=zeros.float().T.contiguous(),
            groups=None,
            bits=BITS,
        )

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Unpacks [R, words] to [R, words * 8], with outputs in their own order."""
        numbers = unpack_columns(packed, BITS).view(len(packed), -1, PER_WORD)
        return numbers[..., self._places].flatten(1)

    def _count(self, inputs: int) -> int:
        return 1 if self.group_size == -1 else -(-inputs // self.group_size)
