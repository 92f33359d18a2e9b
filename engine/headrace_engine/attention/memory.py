"""Zeroed memory for KV caches, which on CPUs costs nothing before it is written."""

import math

import numpy as np
import torch


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like torch.zeros, but on CPUs the pages are mapped by their first use (calloc), so that a
    large cache neither delays the start nor takes memory that no sequence needs."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    buffer = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(buffer).view(dtype).view(shape)
