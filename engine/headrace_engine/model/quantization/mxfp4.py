"""MXFP4 checkpoints, as those of gpt-oss: a layer's experts together, all else in whole weights.

Blocks of 32 inputs have 16 bytes of e2m1 numbers, the first of two in the low half, and a byte that
is their exponent.
"""

from collections.abc import Mapping
from typing import ClassVar

from ..fields import Fields
from ..tensor_files import Shape, TensorFiles
from .base import TensorSpec
from .mxfp4_weight import BLOCK, MXFP4Weight


class MXFP4:
    name: ClassVar[str] = "mxfp4"
    whole_numbers: ClassVar[bool] = False

    def __init__(self, fields: Fields) -> None:
        """There are no variants: which modules are so is told by their tensors."""

    def stores(self, module: str, files: TensorFiles) -> bool:
        return f"{module}_blocks" in files.tensors

    def tensors(self, module: str, shape: Shape, files: TensorFiles) -> Mapping[str, TensorSpec]:
        """`shape` is [experts, in, out], as whole matrices would be stored."""
        experts, inputs, outputs = shape
        found = (experts, outputs, inputs // BLOCK)
        return {
            f"{module}_blocks": TensorSpec(((*found, BLOCK // 2),), ("U8",)),
            f"{module}_scales": TensorSpec((found,), ("U8",)),
        }

    def read(self, module: str, shape: Shape, files: TensorFiles) -> MXFP4Weight:
        """The experts' matrices below each other."""
        blocks, scales = files.load(f"{module}_blocks"), files.load(f"{module}_scales")
        return MXFP4Weight(blocks.flatten(0, 1), scales.flatten(0, 1))
