"""Finds a checkpoint's quantisation by the quantization_config of its config.json."""

from collections.abc import Callable, Mapping

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.fields import Fields
from ...core.errors import ConfigError
from .awq import AWQ
from .base import QuantizedFormat
from .compressed_tensors import CompressedTensors
from .fp8 import FP8
from .fp8_on_load import FP8OnLoad
from .gguf import GGUF
from .gptq import GPTQ
from .mxfp4 import MXFP4

FORMATS: Mapping[str, Callable[[Fields], QuantizedFormat]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "mxfp4": MXFP4,
    "gguf": GGUF,
}


def find_format(
    checkpoint: Checkpoint, wanted: str, device: torch.device
) -> QuantizedFormat | None:
    """The checkpoint's quantisation; None if it is unquantised.

    `wanted` is the engine's setting: a name of FORMATS must be the checkpoint's own format, except
    that fp8 rounds unquantised weights, on `device`. Raises ConfigError for a method or a field
    that is not supported.
    """
    path = checkpoint.folder / "config.json"
    content = checkpoint.quantization_config
    fields = Fields(path, content, prefix="quantization_config.")
    method = fields.get("quant_method", None) if content else None
    if content and method not in FORMATS:
        raise fields.error(
            "quant_method",
            f"one of {', '.join(FORMATS)} (or use an unquantised checkpoint; --quantization "
            "int8 makes it smaller)",
        )
    if wanted == "fp8" and not content:
        return FP8OnLoad(device)
    if wanted in FORMATS and wanted != method:
        stored = f"quantised with {method}" if content else "not quantised"
        raise ConfigError(
            f"quantization {wanted} is for checkpoints of that kind, and {checkpoint.folder} is "
            f"{stored}: use quantization none, or int8"
        )
    return FORMATS[method](fields) if isinstance(method, str) else None
