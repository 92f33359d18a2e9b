"""Whole checkpoints whose linear layers become fp8 when they are loaded: vLLM's quantization fp8.

Embeddings, the output matrix, norms, routers of experts and experts that are stored together stay
whole.
"""

import re
from collections.abc import Mapping
from typing import ClassVar

import torch

from ..tensor_files import Shape, TensorFiles
from .base import FLOATS, TensorSpec
from .float8_weight import Float8Weight, round_weight

_LINEAR = re.compile(
    r"\.(q_proj|k_proj|v_proj|qkv_proj|o_proj|gate_proj|up_proj|gate_up_proj|down_proj|w[123])$"
)


def is_linear(module: str) -> bool:
    return _LINEAR.search(module) is not None


class FP8OnLoad:
    """Rounds on `device`, to which the matrices go anyway."""

    name: ClassVar[str] = "fp8"
    whole_numbers: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stores(self, module: str, files: TensorFiles) -> bool:
        return is_linear(module) and f"{module}.weight" in files.tensors

    def tensors(self, module: str, shape: Shape, files: TensorFiles) -> Mapping[str, TensorSpec]:
        return {f"{module}.weight": TensorSpec((shape,), (*FLOATS, "F64"))}

    def read(self, module: str, shape: Shape, files: TensorFiles) -> Float8Weight:
        return round_weight(files.load(f"{module}.weight").to(self._device))
