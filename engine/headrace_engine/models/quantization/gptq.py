"""GPTQ checkpoints (AutoGPTQ, GPTQModel), https://arxiv.org/abs/2210.17323.

Numbers are packed along the inputs, zero points along the outputs. The first format stores zero
points minus one; `gptq_v2` stores them as they are. With desc_act, g_idx names each input's group.
"""

from collections.abc import Mapping
from typing import ClassVar

from ...checkpoints.fields import Fields
from ...checkpoints.tensor_files import Shape, TensorFiles
from ...layers.quantized_weight import WORD_BITS, QuantizedWeight, unpack_columns, unpack_rows
from .base import FLOATS, TensorSpec, read_groups

BITS = (2, 4, 8)
GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)


class GPTQ:
    name: ClassVar[str] = "gptq"
    integer_weights: ClassVar[bool] = True

    def __init__(self, fields: Fields) -> None:
        fields.require("bits", BITS, default=None)
        fields.require("group_size", GROUP_SIZES, default=-1)
        fields.require("checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
        self.bits: int = fields.get("bits", 0)
        self.group_size: int = fields.get("group_size", -1)
        self._offset = 1 if fields.get("checkpoint_format", "gptq") == "gptq" else 0

    def stores(self, module: str, files: TensorFiles) -> bool:
        return f"{module}.qweight" in files.tensors

    def tensors(self, module: str, shape: Shape, files: TensorFiles) -> Mapping[str, TensorSpec]:
        out, inputs = shape
        groups, per_word = self._count(inputs), WORD_BITS // self.bits
        found = {
            f"{module}.qweight": TensorSpec(((-(-inputs // per_word), out),), ("I32",)),
            f"{module}.qzeros": TensorSpec(((groups, -(-out // per_word)),), ("I32",)),
            f"{module}.scales": TensorSpec(((groups, out),), FLOATS),
        }
        if f"{module}.g_idx" in files.tensors:
            found[f"{module}.g_idx"] = TensorSpec(((inputs,),), ("I32", "I64"))
        return found

    def read(self, module: str, shape: Shape, files: TensorFiles) -> QuantizedWeight:
        out, inputs = shape
        values = unpack_rows(files.load(f"{module}.qweight"), self.bits)[:inputs]
        zeros = unpack_columns(files.load(f"{module}.qzeros"), self.bits)[:, :out]
        # A zero point of 0 wraps around to the largest number.
        zeros = (zeros + self._offset) & ((1 << self.bits) - 1)
        return QuantizedWeight(
            values=values.T.contiguous(),
            scales=files.load(f"{module}.scales").float().T.contiguous(),
            zeros=zeros.float().T.contiguous(),
            groups=read_groups(f"{module}.g_idx", inputs, self._count(inputs), files),
            bits=self.bits,
        )

    def _count(self, inputs: int) -> int:
        return 1 if self.group_size == -1 else -(-inputs // self.group_size)
