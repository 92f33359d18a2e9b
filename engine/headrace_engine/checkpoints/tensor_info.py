"""What a file's header says about a stored tensor."""

from dataclasses import dataclass
from pathlib import Path

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor's file, shape and dtype. The dtype is named as in safetensors, or as in ggml
    if the tensor is quantised in a GGUF file."""

    file: Path
    shape: Shape
    dtype: str
