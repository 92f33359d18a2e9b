"""fp8 checkpoints: one scale for a matrix, or one for each block of 128 x 128 (DeepSeek, Qwen).

GPUs keep fp8; on CPUs the weights are converted to the engine's dtype at load.
"""

from collections.abc import Mapping
from typing import ClassVar

from ...checkpoints.fields import Fields
from ...checkpoints.tensor_files import Shape, TensorFiles
from ...layers.float8_weight import Float8Weight
from .base import FLOATS, TensorSpec

# Names of the scale in checkpoints of different makers. With either name, weights are multiplied
# by it.
SCALES = ("weight_scale_inv", "weight_scale")


class FP8:
    name: ClassVar[str] = "fp8"
    integer_weights: ClassVar[bool] = False

    def __init__(self, fields: Fields) -> None:
        fields.require("fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
        block = fields.get("weight_block_size", None)
        if block is not None:
            block = tuple(map(int, fields.numbers("weight_block_size", 2)))
        self._block: tuple[int, int] | None = block

    def stores(self, module: str, files: TensorFiles) -> bool:
        return self._scale(module, files) is not None

    def tensors(self, module: str, shape: Shape, files: TensorFiles) -> Mapping[str, TensorSpec]:
        scale = self._scale(module, files)
        assert scale is not None, "asked of a module that is not quantised"
        shapes: tuple[Shape, ...] = ((), (1,), (1, 1), (shape[0],), (shape[0], 1))
        if self._block is not None:
            shapes = (
                tuple(-(-size // step) for size, step in zip(shape, self._block, strict=True)),
            )
        return {
            f"{module}.weight": TensorSpec((shape,), ("F8_E4M3",)),
            scale: TensorSpec(shapes, FLOATS),
        }

    def read(self, module: str, shape: Shape, files: TensorFiles) -> Float8Weight:
        name = self._scale(module, files)
        assert name is not None, "asked of a module that is not quantised"
        values, scales = files.load(f"{module}.weight"), files.load(name).float()
        if self._block is None:
            scales = scales.reshape(-1, 1).expand(shape[0], 1)
            return Float8Weight(values, scales, group=shape[1])
        down, across = self._block
        return Float8Weight(values, scales.repeat_interleave(down, dim=0)[: shape[0]], across)

    def _scale(self, module: str, files: TensorFiles) -> str | None:
        for name in SCALES:
            if (scale := f"{module}.{name}") in files.tensors:
                return scale
        return None
