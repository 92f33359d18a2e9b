"""GGUF files: each matrix has its own type, and blocks of 32 or 256 inputs with scales.

The native kernels of CPUs keep the blocks of most types. Other matrices become floats of the
engine's dtype at load, except that operators with layers of integers (GPUs) keep those of Q8_0 and
Q4_0, whose values such layers hold exactly; there embeddings become floats.
"""

import copy
from collections.abc import Mapping
from typing import ClassVar

from ...checkpoints.fields import Fields
from ...checkpoints.gguf_tensors import BLOCKS, unsupported
from ...checkpoints.tensor_files import Shape, TensorFiles
from ...core.errors import ConfigError
from ...layers.gguf_weight import GGUFWeight
from ...layers.quantized_weight import QuantizedWeight
from .base import TensorSpec


class GGUF:
    name: ClassVar[str] = "gguf"
    # They are not rounded to 8 bits for each output, which would lose what blocks keep.
    integer_weights: ClassVar[bool] = False

    def __init__(self, fields: Fields) -> None:
        self.types: list[str] = fields.get("types", [])
        if not isinstance(self.types, list):
            raise fields.error("types", "a list of types")
        for kind in self.types:
            if kind not in BLOCKS:
                raise ConfigError(unsupported(fields.path.parent, kind, "a tensor"))
        self._packed = False

    def packed(self) -> "GGUF":
        """The same format, with integers kept where their values are exact."""
        found = copy.copy(self)
        found._packed = True
        return found

    def stores(self, module: str, files: TensorFiles) -> bool:
        info = files.tensors.get(f"{module}.weight")
        return info is not None and info.dtype in BLOCKS

    def tensors(self, module: str, shape: Shape, files: TensorFiles) -> Mapping[str, TensorSpec]:
        return {f"{module}.weight": TensorSpec((shape,), tuple(BLOCKS))}

    def read(self, module: str, shape: Shape, files: TensorFiles) -> GGUFWeight | QuantizedWeight:
        name = f"{module}.weight"
        weight = GGUFWeight(files.load(name), files.tensors[name].dtype, shape[1])
        integers = self._packed and not module.endswith("embed_tokens")
        return (weight.quantized() if integers else None) or weight
