"""Memory for KV caches: zeroed on the device, a pool of blocks on the host, moves between them.

A block is the first dimension of every tensor of a cache, for every backend.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..core.attention_backend import KVSpec, LayerCache


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like torch.zeros, but on CPUs pages are mapped at first use (calloc): a large cache neither
    delays the start nor takes memory before a sequence needs it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    buffer = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(buffer).view(dtype).view(shape)


def index_keys(num_blocks: int, spec: KVSpec) -> LayerCache:
    """The part of a cache that holds an indexer's keys; nothing if the layer has no indexer."""
    if not spec.indexed:
        return ()
    return (zeros((num_blocks, spec.block_size, spec.indexed), spec.dtype, spec.device),)


def host_blocks(cache: LayerCache, num_blocks: int) -> LayerCache:
    """Allocates host memory for `num_blocks` blocks of a layer's cache.

    It is pinned if the cache is on a GPU.
    """
    return tuple(_host_part(part, (num_blocks, *part.shape[1:])) for part in cache)


def _host_part(part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if part.device.type == "cuda":
        return torch.empty(shape, dtype=part.dtype, pin_memory=True)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=part.dtype)
    return zeros(shape, part.dtype, torch.device("cpu"))


def move_blocks(
    source: LayerCache, destination: LayerCache, moves: Sequence[tuple[int, int]]
) -> None:
    """Copies whole blocks (from, to), adjacent ones in one copy; on a GPU in the stream's order."""
    for begin, to, count in _runs(moves):
        for from_part, to_part in zip(source, destination, strict=True):
            to_part[to : to + count].copy_(from_part[begin : begin + count], non_blocking=True)


def _runs(moves: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Merges adjacent moves into (from, to, number of blocks)."""
    runs: list[tuple[int, int, int]] = []
    for source, destination in moves:
        if runs:
            begin, to, count = runs[-1]
            if (source, destination) == (begin + count, to + count):
                runs[-1] = begin, to, count + 1
                continue
        runs.append((source, destination, 1))
    return runs
