"""The interface between the reader of weights and a quantised checkpoint's format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from ...checkpoints.tensor_files import Shape, TensorFiles
from ...core.errors import CheckpointError
from ...layers.float8_weight import Float8Weight
from ...layers.gguf_weight import GGUFWeight
from ...layers.mxfp4_weight import MXFP4Weight
from ...layers.quantized_weight import QuantizedWeight, contiguous_groups

StoredWeight = QuantizedWeight | Float8Weight | MXFP4Weight | GGUFWeight
FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shapes and dtypes (as safetensors names them) that a stored tensor may have."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]


class QuantizedFormat(Protocol):
    """A quantisation that config.json describes. `module` is a weight's name without `.weight`."""

    name: ClassVar[str]

    @property
    def integer_weights(self) -> bool:
        """Whether weights are integers; an 8-bit copy then represents them almost exactly."""

    def stores(self, module: str, files: TensorFiles) -> bool:
        """Whether this module is quantised."""

    def tensors(self, module: str, shape: Shape, files: TensorFiles) -> Mapping[str, TensorSpec]:
        """The stored tensors that hold the module's weight of this shape (out, in)."""

    def read(self, module: str, shape: Shape, files: TensorFiles) -> StoredWeight:
        """Reads the weight of this shape (out, in)."""


def read_groups(name: str, inputs: int, count: int, files: TensorFiles) -> torch.Tensor | None:
    """Reads the group of each input from the tensor `name`, if it is stored.

    Returns None for contiguous groups of one size, as QuantizedWeight expects. Raises
    CheckpointError for a group that does not exist.
    """
    usual = contiguous_groups(inputs, count)
    if name not in files.tensors:
        return None if inputs % count == 0 else usual
    groups = files.load(name).long()
    if inputs % count == 0 and torch.equal(groups, usual):
        return None
    if bool((groups < 0).any()) or bool((groups >= count).any()):
        raise CheckpointError(f"{files.tensors[name].file}: {name} names a group above {count - 1}")
    return groups
