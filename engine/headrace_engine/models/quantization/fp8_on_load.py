"""Unquantised checkpoints whose linear layers are rounded to fp8 at load: vLLM's quantization fp8.

Embeddings, the output matrix, norms, routers of experts and experts that are stored as one tensor
are not rounded.
"""

import re
from collections.abc import Mapping
from typing import ClassVar

import torch

from ...checkpoints.tensor_files import Shape, TensorFiles
from ...layers.float8_weight import Float8Weight, round_weight
from .base import FLOATS, TensorSpec

_LINEAR = re.compile(
    r"\.(q_proj|k_proj|v_proj|qkv_proj|o_proj|gate_proj|up_proj|gate_up_proj|down_proj|w[123]"
    r"|q_a_proj|q_b_proj|kv_a_proj_with_mqa"
    r"|in_proj|in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj|input_linear|output_linear)$"
)


def is_linear(module: str) -> bool:
    return _LINEAR.search(module) is not None


class FP8OnLoad:
    """Rounds on `device`, where the matrices go in any case."""

    name: ClassVar[str] = "fp8"
    integer_weights: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stores(self, module: str, files: TensorFiles) -> bool:
        found = files.tensors.get(f"{module}.weight")
        return is_linear(module) and found is not None and len(found.shape) == 2

    def tensors(self, module: str, shape: Shape, files: TensorFiles) -> Mapping[str, TensorSpec]:
        return {f"{module}.weight": TensorSpec((shape,), (*FLOATS, "F64"))}

    def read(self, module: str, shape: Shape, files: TensorFiles) -> Float8Weight:
        return round_weight(files.load(f"{module}.weight").to(self._device))
