"""Paged attention on CPUs, through the native kernels.

The kernels define the layout of the cache (kernels/cpu/cache.h); latents have that of the reference
backend, which computes everything that the native kernels do not support: other dtypes, other head
sizes, other machines.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

from ..core.attention_backend import AttentionMetadata, KVSpec, LayerCache, LayerParams
from ..kernels.cpu import library, structs
from ..kernels.cpu.executor import pointer
from ..layers.fp8_cache import E4M3, E5M2, raw
from .memory import zeros
from .reference import ReferenceBackend
from .step_cache import StepCache

logger = logging.getLogger(__name__)

TILE = 16
# Numbers of the storage dtypes in fp8.h; every other dtype is stored as it is.
STORAGES = {E4M3: 1, E5M2: 2}
MAX_HEAD_DIM = 256
# The most elements of a latent that are values.
MAX_RANK = 1024
# The key of the cache of structs: parameters, address of the sinks, number of query heads, number
# of KV heads, elements of a head, block size.
_LayerKey = tuple[LayerParams, int | None, int, int, int, int]


class CpuBackend:
    """Native attention. Its cache is [blocks, tiles of a block, Hkv, 2, 16 * D], and an empty
    tensor [blocks, block_size, 0] that holds the block size. A chunk of fp8 keys is converted to
    the model's dtype when it is read."""

    name: ClassVar[str] = "cpu"
    attends_in_chunks: ClassVar[Literal[True]] = True

    def __init__(self, kernels: library.Kernels | None = None) -> None:
        """`kernels` None loads the best kernels for this CPU; if there are none, a log says why."""
        self.kernels = kernels or _load()
        self._reference = ReferenceBackend()
        self._batches = StepCache[structs.Batch]()
        self._layers: dict[_LayerKey, tuple[LayerParams, structs.Layer]] = {}

    def allocate(self, num_blocks: int, spec: KVSpec) -> LayerCache:
        if spec.latent or not self.is_native(spec.dtype, spec.head_dim):
            return self._reference.allocate(num_blocks, spec)
        tiles = -(-spec.block_size // TILE)
        shape = (num_blocks, tiles, spec.num_kv_heads, 2, TILE * spec.head_dim)
        holder = torch.empty((num_blocks, spec.block_size, 0), dtype=spec.stored)
        return zeros(shape, spec.stored, spec.device), holder

    def block_bytes(self, spec: KVSpec) -> int:
        if spec.latent or not self.is_native(spec.dtype, spec.head_dim):
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
        if self.kernels is None or not self.is_native(query.dtype, query.shape[2]):
            return self._reference.forward(query, key, value, cache, metadata, params)
        query, key, value = _rows(query), _rows(key), _rows(value)
        output = torch.empty(query.shape, dtype=query.dtype)
        failed = self.kernels.paged_attention(
            output.data_ptr(),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            cache[0].data_ptr(),
            query.stride(0),
            key.stride(0),
            value.stride(0),
            ctypes.addressof(self._batches.of(metadata, describe)),
            ctypes.addressof(self._describe_layer(query, key.shape[1], cache, params)),
        )
        if failed:
            raise MemoryError("no memory for the work list of paged attention")
        return output

    def read_kv(
        self, cache: LayerCache, blocks: torch.Tensor, begin: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cache[0].dim() == 4:
            return self._reference.read_kv(cache, blocks, begin, end, dtype)
        # As kernels/cpu/tile.h describes a tile.
        size, pack = cache[1].shape[1], 2 if dtype is torch.bfloat16 else 1
        first, last = begin // size, -(-end // size)
        found = raw(cache[0]).index_select(0, blocks[first:last].long())
        count, tiles, heads, _, elements = found.shape
        dims = elements // TILE
        shapes = (dims // pack, TILE, pack), (TILE // pack, dims, pack)
        orders = (0, 1, 4, 2, 3, 5), (0, 1, 3, 5, 2, 4)
        keys, values = (
            found[:, :, :, part]
            .reshape(count, tiles, heads, *shape)
            .permute(order)
            .reshape(count, tiles * TILE, heads, dims)[:, :size]
            .flatten(0, 1)[begin - first * size : end - first * size]
            .view(cache[0].dtype)
            for part, (shape, order) in enumerate(zip(shapes, orders, strict=True))
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
        dim = query.shape[2]
        if self.kernels is None or not self.is_native_latent(query.dtype, dim, rank):
            return self._reference.forward_latent(query, latents, cache, metadata, params, rank)
        query, latents = _rows(query), latents if latents.stride(1) == 1 else latents.contiguous()
        output = query.new_empty(*query.shape[:2], rank)
        failed = self.kernels.latent_attention(
            output.data_ptr(),
            query.data_ptr(),
            latents.data_ptr(),
            cache[0].data_ptr(),
            query.stride(0),
            latents.stride(0),
            rank,
            ctypes.addressof(self._batches.of(metadata, describe)),
            ctypes.addressof(self._describe_layer(query, 1, cache, params)),
        )
        if failed:
            raise MemoryError("no memory for attention to latents")
        return output

    def is_native(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the native kernels support such heads; the reference backend computes the
        others."""
        return (
            self.kernels is not None
            and dtype in library.DTYPES
            and head_dim % TILE == 0
            and head_dim <= MAX_HEAD_DIM
        )

    def is_native_latent(self, dtype: torch.dtype, head_dim: int, rank: int) -> bool:
        """Whether the native kernels support latents of `rank` elements in keys of `head_dim`."""
        return (
            self.kernels is not None
            and dtype in library.DTYPES
            and head_dim % 2 == 0
            and rank % TILE == 0
            and rank <= MAX_RANK
        )

    def _describe_layer(
        self, query: torch.Tensor, kv_heads: int, cache: LayerCache, params: LayerParams
    ) -> structs.Layer:
        heads, dim = query.shape[1:]
        block_size, storage = cache[-1].shape[1], STORAGES.get(cache[0].dtype, 0)
        sinks = pointer(params.sinks)
        name = (params, sinks, heads, kv_heads, dim, block_size)
        found = self._layers.get(name)
        kind = (query.dtype is torch.bfloat16, storage)
        if found is None or (found[1].is_bfloat16, found[1].storage) != kind:
            made = structs.Layer(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                block_size=block_size,
                window=params.window_code,
                is_bfloat16=kind[0],
                storage=storage,
                scale=params.scale,
                softcap=params.softcap or 0.0,
                key_scale=params.key_scale,
                value_scale=params.value_scale,
                sinks=sinks,
            )
            # The parameters are kept too: they own the memory that the structure points to.
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
    """Makes the heads of a token adjacent in x [T, H, D]; rows may have gaps, as in views of
    QKV."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()


def describe(metadata: AttentionMetadata) -> structs.Batch:
    """Makes a structure that points into the metadata's tensors, which must outlive it."""
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
    """Each layer's metadata for the native kernels, if layers have different metadata. It points
    into the metadata's tensors, and must live as long as the call that uses it."""

    def __init__(self, layers: Sequence[AttentionMetadata]) -> None:
        made = {id(one): one for one in layers}
        self._batches = {key: describe(one) for key, one in made.items()}
        pointers = [ctypes.addressof(self._batches[id(one)]) for one in layers]
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers) if layers else None

    @property
    def address(self) -> int | None:
        """Address of the batches; None if there are no layers."""
        return None if self._pointers is None else ctypes.addressof(self._pointers)
