"""A checkpoint's divisors of keys and values in 8-bit floats.

Quantisers that calibrate them (llm-compressor, AutoFP8, ModelOpt) store one number a layer beside
the attention's weights. Reads nothing else.
"""

import math
from collections.abc import Callable
from pathlib import Path

from ...checkpoints.tensor_files import TensorFiles
from ...core.errors import CheckpointError
from ..layout import Piece

# Suffixes of the attention's name, newer names first; K stands for k or v.
NAMES = ("K_scale", "attn.K_scale", "K_proj.K_scale", "K_proj.output_scale")
NORM = "input_layernorm.weight"

Scales = tuple[tuple[float, float], ...]


def read_kv_scales(folder: Path, layers: int, locate: Callable[[str], Piece]) -> Scales | None:
    """(of keys, of values) of each layer, 1 if it has none; None if no layer has any.

    Raises CheckpointError unless each is one number above 0.
    """
    files = TensorFiles(folder)
    prefixes = [
        locate(f"model.layers.{index}.{NORM}").stored.removesuffix(NORM) + "self_attn."
        for index in range(layers)
    ]
    found = [(_read(files, prefix, "k"), _read(files, prefix, "v")) for prefix in prefixes]
    if all(scale is None for pair in found for scale in pair):
        return None
    return tuple((key or 1.0, value or 1.0) for key, value in found)


def _read(files: TensorFiles, prefix: str, letter: str) -> float | None:
    names = [prefix + name.replace("K", letter) for name in NAMES]
    name = next((name for name in names if name in files.tensors), None)
    if name is None:
        return None
    stored = files.load(name).float()
    scale = float(stored) if stored.numel() == 1 else math.nan
    if not 0.0 < scale < math.inf:
        raise CheckpointError(
            f"{files.tensors[name].file}: {name} must be one number above 0: use kv_cache_dtype "
            "auto, or a checkpoint with a scale a layer"
        )
    return scale
