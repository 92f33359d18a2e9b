"""Attention of an image's tokens to later ones of the same image, which causal kernels leave out.

Computed with torch over the cache, for the rows of images alone.
"""

import torch
from torch.nn import functional as F

from ..core.attention_backend import (
    AttentionBackend,
    LayerCache,
    LayerParams,
    ReadsKV,
)
from ..layers.fp8_cache import dequantize_kv


def attend_to_image(
    backend: AttentionBackend,
    query: torch.Tensor,
    cache: LayerCache,
    blocks: torch.Tensor,
    params: LayerParams,
    first: int,
) -> torch.Tensor:
    """Attends from the positions `first` and on, query [n, Hq, D], to all positions before the last
    one's end, as far as the layer's window goes back. `blocks` is the sequence's row of the block
    tables. Returns [n, Hq, D]."""
    assert isinstance(backend, ReadsKV), f"{backend.name} reads no keys"
    assert params.softcap is None and params.sinks is None and params.chunk is None
    end, window = first + len(query), params.sliding_window
    begin = 0 if window is None else max(0, first - window + 1)
    found = backend.read_kv(cache, blocks, begin, end, query.dtype)
    scales = params.key_scale, params.value_scale
    keys, values = (
        dequantize_kv(part, scale).to(query.dtype).transpose(0, 1)
        for part, scale in zip(found, scales, strict=True)
    )
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        _visible(begin, first, end, window, query.device),
        scale=params.scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _visible(
    begin: int, first: int, end: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """bool [positions, keys]; None if each position sees all keys."""
    if window is None:
        return None
    keys = torch.arange(begin, end, device=device)
    return keys[None] > torch.arange(first, end, device=device)[:, None] - window
