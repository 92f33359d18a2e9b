"""Paged attention in plain torch: the reference for the tests of every other backend.

It supports every device, dtype, head grouping, scale, softcap, window and chunk. It computes in
float32, one sequence after the other, and is not fast.
"""

from typing import ClassVar, Literal

import torch

from ..core.attention_backend import AttentionMetadata, KVSpec, LayerCache, LayerParams
from ..layers.fp8_cache import dequantize_kv, quantize_kv, raw
from .memory import index_keys, zeros


class ReferenceBackend:
    """Plain torch attention. Its cache is keys and values, each [blocks, block_size, Hkv, D]."""

    name: ClassVar[str] = "reference"
    attends_in_chunks: ClassVar[Literal[True]] = True

    def allocate(self, num_blocks: int, spec: KVSpec) -> LayerCache:
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        if spec.latent:
            return (zeros(shape, spec.stored, spec.device), *index_keys(num_blocks, spec))
        return zeros(shape, spec.stored, spec.device), zeros(shape, spec.stored, spec.device)

    def block_bytes(self, spec: KVSpec) -> int:
        parts = 1 if spec.latent else 2
        elements = parts * spec.block_size * spec.num_kv_heads * spec.head_dim
        return elements * spec.stored.itemsize + spec.index_bytes

    def copy_blocks(self, cache: LayerCache, copies: torch.Tensor) -> None:
        for part in map(raw, cache):
            part[copies[:, 1]] = part[copies[:, 0]]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> torch.Tensor:
        scales = (params.key_scale, params.value_scale)
        for part, new, scale in zip(cache, (key, value), scales, strict=True):
            store(new, part, metadata.slots, scale)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts = metadata.query_start.tolist()
        for index, length in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[index], starts[index + 1])
            keys, values = (
                dequantize_kv(gather(part, metadata.block_tables[index], length), scale)
                for part, scale in zip(cache, scales, strict=True)
            )
            output[rows] = attend(query[rows], keys, values, params)
        return output

    def read_kv(
        self, cache: LayerCache, blocks: torch.Tensor, begin: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = cache[0].shape[1]
        first = begin // size
        keys, values = (
            gather(part, blocks[first:], end - first * size)[begin - first * size :]
            for part in cache
        )
        return keys, values

    def forward_latent(
        self,
        query: torch.Tensor,
        latents: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
        rank: int,
    ) -> torch.Tensor:
        (part,), scale = cache, params.key_scale
        store(latents[:, None], part, metadata.slots, scale)
        output = query.new_empty(*query.shape[:2], rank)
        starts = metadata.query_start.tolist()
        for index, length in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[index], starts[index + 1])
            keys = dequantize_kv(gather(part, metadata.block_tables[index], length), scale)
            output[rows] = attend(query[rows], keys, keys[..., :rank], params)
        return output


def store(new: torch.Tensor, part: torch.Tensor, slots: torch.Tensor, scale: float) -> None:
    """Writes keys or values [T, ...] to their slots in a cache [blocks, block_size, ...]."""
    made = raw(quantize_kv(new, part.dtype, scale))
    raw(part).flatten(0, 1).index_copy_(0, slots, made)


def gather(part: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """Gathers the keys or values [length, ...] of one sequence from the cache."""
    count = -(-length // part.shape[1])
    found = raw(part).index_select(0, blocks[:count].long())
    return found.flatten(0, 1)[:length].view(part.dtype)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: LayerParams
) -> torch.Tensor:
    """Computes causal attention of the last n positions: query [n, Hq, D], keys and values [L, Hkv,
    D]."""
    n, heads, dim = query.shape
    length, kv_heads = keys.shape[:2]
    grouped = query.float().view(n, kv_heads, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (grouped @ keys.permute(1, 2, 0)).view(kv_heads, -1, n, length) * params.scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if n > 1 or params.span is not None:  # the last position alone sees every key
        scores = scores.masked_fill(~_visible(n, length, params, query.device), -torch.inf)
    weights = _softmax(scores, params.sinks).flatten(1, 2)
    attended = (weights @ values.transpose(0, 1)).view(kv_heads, -1, n, values.shape[-1])
    return attended.permute(2, 0, 1, 3).reshape(n, heads, -1).to(query.dtype)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of scores [Hkv, group, n, L] that includes each head's sink."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    own = sinks.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, own], dim=-1), dim=-1)[..., :-1]


def _visible(n: int, length: int, params: LayerParams, device: torch.device) -> torch.Tensor:
    """bool [n, length]: the keys that each of the last n positions sees."""
    positions = torch.arange(length - n, length, device=device)[:, None]
    keys = torch.arange(length, device=device)[None, :]
    visible = keys <= positions
    if params.sliding_window is not None:
        visible &= keys > positions - params.sliding_window
    if params.chunk is not None:
        visible &= keys >= positions // params.chunk * params.chunk
    return visible
