"""MXFP4 checkpoints like gpt-oss: a layer's experts in one tensor, everything else unquantised.

Blocks of 32 inputs have 16 bytes of e2m1 numbers, the first of two in the low half, and a byte that
is their exponent.
"""

from collections.abc import Mapping
from typing import ClassVar

from ...checkpoints.fields import Fields
from ...checkpoints.tensor_files import Shape, TensorFiles
from ...layers.mxfp4_weight import BLOCK, MXFP4Weight
from .base import TensorSpec


class MXFP4:
    name: ClassVar[str] = "mxfp4"
    integer_weights: ClassVar[bool] = False

    def __init__(self, fields: Fields) -> None:
        """The format has no variants; the stored tensors show which modules are quantised."""

    def stores(self, module: str, files: TensorFiles) -> bool:
        return f"{module}_blocks" in files.tensors

    def tensors(self, module: str, shape: Shape, files: TensorFiles) -> Mapping[str, TensorSpec]:
        """`shape` is [experts, in, out], as unquantised matrices would be stored."""
        experts, inputs, outputs = shape
        found = (experts, outputs, inputs // BLOCK)
        return {
            f"{module}_blocks": TensorSpec(((*found, BLOCK // 2),), ("U8",)),
            f"{module}_scales": TensorSpec((found,), ("U8",)),
        }

    def read(self, module: str, shape: Shape, files: TensorFiles) -> MXFP4Weight:
        """Reads the experts' matrices, stacked."""
        blocks, scales = files.load(f"{module}_blocks"), files.load(f"{module}_scales")
        return MXFP4Weight(blocks.flatten(0, 1), scales.flatten(0, 1))
