"""Paged attention on CPUs, through the native kernels.

The cache's layout is the kernels' own (kernels/cache.h). Where there are no native kernels, or for
dtypes and head sizes that they lack, everything is left to the reference backend.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import ClassVar

import torch

from ..kernels import library, structs
from ..kernels.executor import pointer
from .base import AttentionMetadata, KVSpec, LayerCache, LayerParams
from .fp8 import E4M3, E5M2
from .memo import StepMemo
from .memory import zeros
from .reference import ReferenceBackend

logger = logging.getLogger(__name__)

TILE = 16
# As fp8.h counts them; all else is the element's own type.
STORAGES = {E4M3: 1, E5M2: 2}
MAX_HEAD_DIM = 256
# Parameters, where sinks lie, query heads, shape of keys, block size.
_LayerKey = tuple[LayerParams, int | None, int, torch.Size, int]


class CpuBackend:
    """Cache: [blocks, tiles of a block, Hkv, 2, 16 * D], and an empty [blocks, block_size, 0] that
    holds the block size. A chunk of keys in fp8 becomes the model's dtype when it is read."""

    name: ClassVar[str] = "cpu"

    def __init__(self, kernels: library.Kernels | None = None) -> None:
        """`kernels` None loads the best ones for this CPU, or logs why there are none."""
        self._kernels = kernels or _load()
        self._reference = ReferenceBackend()
        self._batches = StepMemo[structs.Batch]()
        self._layers: dict[_LayerKey, tuple[LayerParams, structs.Layer]] = {}

    @property
    def kernels(self) -> library.Kernels | None:
        return self._kernels

    def allocate(self, num_blocks: int, spec: KVSpec) -> LayerCache:
        if not self.is_native(spec.dtype, spec.head_dim):
            return self._reference.allocate(num_blocks, spec)
        tiles = -(-spec.block_size // TILE)
        shape = (num_blocks, tiles, spec.num_kv_heads, 2, TILE * spec.head_dim)
        holder = torch.empty((num_blocks, spec.block_size, 0), dtype=spec.stored)
        return zeros(shape, spec.stored, spec.device), holder

    def block_bytes(self, spec: KVSpec) -> int:
        if not self.is_native(spec.dtype, spec.head_dim):
            return self._reference.block_bytes(spec)
        tiles = -(-spec.block_size // TILE)
        return 2 * tiles * TILE * spec.num_kv_heads * spec.head_dim * spec.stored.itemsize

    def copy_blocks(self, cache: LayerCache, copies: torch.Tensor) -> None:
        self._reference.copy_blocks(cache, copies)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> torch.Tensor:
        if self._kernels is None or not self.is_native(query.dtype, query.shape[2]):
            return self._reference.forward(query, key, value, cache, metadata, params)
        query, key, value = _rows(query), _rows(key), _rows(value)
        output = torch.empty(query.shape, dtype=query.dtype)
        failed = self._kernels.paged_attention(
            output.data_ptr(),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            cache[0].data_ptr(),
            query.stride(0),
            key.stride(0),
            value.stride(0),
            ctypes.addressof(self._batches.of(metadata, describe)),
            ctypes.addressof(self._describe_layer(query, key, cache, params)),
        )
        if failed:
            raise MemoryError("no memory for the work list of paged attention")
        return output

    def is_native(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the native kernels serve heads of this kind; else the reference does."""
        return (
            self._kernels is not None
            and dtype in library.DTYPES
            and head_dim % TILE == 0
            and head_dim <= MAX_HEAD_DIM
        )

    def _describe_layer(
        self, query: torch.Tensor, key: torch.Tensor, cache: LayerCache, params: LayerParams
    ) -> structs.Layer:
        heads, dim = query.shape[1:]
        block_size, storage = cache[1].shape[1], STORAGES.get(cache[0].dtype, 0)
        sinks = pointer(params.sinks)
        name = (params, sinks, heads, key.shape[1:], block_size)
        found = self._layers.get(name)
        kind = (query.dtype is torch.bfloat16, storage)
        if found is None or (found[1].is_bfloat16, found[1].storage) != kind:
            made = structs.Layer(
                num_heads=heads,
                num_kv_heads=key.shape[1],
                head_dim=dim,
                block_size=block_size,
                window=params.sliding_window or 0,
                is_bfloat16=kind[0],
                storage=storage,
                scale=params.scale,
                softcap=params.softcap or 0.0,
                key_scale=params.key_scale,
                value_scale=params.value_scale,
                sinks=sinks,
            )
            # With its parameters, which keep alive what it points to.
            found = self._layers[name] = params, made
        return found[1]


def _load() -> library.Kernels | None:
    try:
        kernels = library.load()
    except library.KernelsUnavailable as error:
        logger.warning("no native kernels, attention will be slow", extra={"reason": str(error)})
        return None
    logger.info("native kernels loaded", extra={"instruction_set": kernels.isa})
    return kernels


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] with the heads of a token side by side; rows may be apart, as in views of QKV."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()


def describe(metadata: AttentionMetadata) -> structs.Batch:
    """Points into the metadata's tensors, which must outlive it."""
    assert metadata.query_start.dtype is torch.int32 and metadata.query_start.is_contiguous()
    assert metadata.seq_lens.dtype is torch.int32 and metadata.seq_lens.is_contiguous()
    assert metadata.block_tables.dtype is torch.int32 and metadata.block_tables.stride(-1) == 1
    assert metadata.slots.dtype is torch.int64 and metadata.slots.is_contiguous()
    return structs.Batch(
        query_start=metadata.query_start.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(),
        block_tables=metadata.block_tables.data_ptr(),
        slots=metadata.slots.data_ptr(),
        num_seqs=metadata.seq_lens.shape[0],
        num_tokens=metadata.slots.shape[0],
        table_stride=metadata.block_tables.stride(0),
    )


class LayerBatches:
    """Each layer's metadata for the native kernels, where not all have the same. Points into the
    metadata's tensors, and must outlive the call that it is for."""

    def __init__(self, layers: Sequence[AttentionMetadata]) -> None:
        made = {id(one): one for one in layers}
        self._batches = {key: describe(one) for key, one in made.items()}
        pointers = [ctypes.addressof(self._batches[id(one)]) for one in layers]
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers) if layers else None

    @property
    def address(self) -> int | None:
        """None: there are no layers."""
        return None if self._pointers is None else ctypes.addressof(self._pointers)
