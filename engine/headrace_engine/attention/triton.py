"""Paged attention on CUDA by this project's Triton kernels: any block size, window or soft cap.

One call serves a mixed batch: the keys of decodes are split over programs and merged, prompts are
computed tile by tile. No call waits for the device, because grids come from the metadata's host
integers, and scratch memory is kept: so CUDA graphs can capture calls.
"""

from typing import Any, ClassVar, Literal

import torch

from ..core.attention_backend import AttentionMetadata, KVSpec, LayerCache, LayerParams
from ..core.errors import ConfigError
from ..device.scratch import Scratch
from ..kernels.triton.cache import store_kernel
from ..kernels.triton.decode import decode_kernel, merge_kernel
from ..kernels.triton.dependent_launch import DependentLaunches
from ..kernels.triton.latent import latent_kernel, merge_latent_kernel, store_latent_kernel
from ..kernels.triton.launch import (
    AMPERE,
    LARGEST_HEAD,
    MAX_SPLITS,
    AttentionLaunches,
    DecodeLaunch,
    Launch,
    decode_launch,
    dot_precision,
    latent_launch,
    latent_splits,
    merge_warps,
    power_of_two,
    prefill_launch,
    split_keys,
    tile_extent,
)
from ..kernels.triton.prefill import prefill_kernel
from ..layers.fp8_cache import Storage, raw, storage
from ..operators.base import TorchOps
from ..operators.qkv import QKVRows
from ..operators.triton import StoreTarget, can_rotate, rotate_and_store
from .memory import index_keys, zeros


class TritonBackend:
    """Triton attention. Its cache is keys and values, each [blocks, Hkv, block_size, D], or latents
    [blocks, block_size, D].

    `capability` is the device's; None asks torch. `deterministic` computes decodes like chunks of
    prompts and always masks tiles of keys, so a token's output has the same bits in every batch.
    Tiles of an fp8 cache are converted to the queries' dtype; devices older than Ada have no e4m3
    instruction and use integer arithmetic. `dependent_launches` are the operators' options for
    programmatic dependent launch. Raises ConfigError for a device older than Ampere.
    """

    name: ClassVar[str] = "triton"
    skips_padding: ClassVar[Literal[True]] = True
    counts_decodes: ClassVar[Literal[True]] = True
    attends_in_chunks: ClassVar[Literal[True]] = True

    def __init__(
        self, capability: tuple[int, int] | None = None, deterministic: bool = False
    ) -> None:
        self._deterministic = deterministic
        self._capability = capability or torch.cuda.get_device_capability()
        self._scratch = Scratch()
        self._launches = AttentionLaunches()
        self.dependent_launches = DependentLaunches()
        self._check_device()

    def _check_device(self) -> None:
        if self._capability < AMPERE:
            raise ConfigError(
                f"attention_backend triton needs compute capability {AMPERE[0]}.{AMPERE[1]}, "
                f"this device has {self._capability[0]}.{self._capability[1]}: "
                "use attention_backend reference"
            )

    def use(self, launches: AttentionLaunches) -> None:
        """Sets the launch parameters, which replace those of the tables."""
        self._launches = launches

    def prefill_launch(self, element_bytes: int, head_dim: int) -> Launch:
        """The table's launch parameters for prompts."""
        return prefill_launch(self._capability[0], element_bytes, head_dim)

    def decode_launch(self, element_bytes: int, head_dim: int, sequences: int) -> DecodeLaunch:
        """The table's launch parameters for decodes."""
        tile = decode_launch(self._capability[0], element_bytes, head_dim)
        return DecodeLaunch(tile, split_keys(sequences, tile.keys))

    def allocate(self, num_blocks: int, spec: KVSpec) -> LayerCache:
        if spec.latent:
            latents = (num_blocks, spec.block_size, spec.head_dim)
            return (zeros(latents, spec.stored, spec.device), *index_keys(num_blocks, spec))
        if spec.head_dim > LARGEST_HEAD:
            raise ConfigError(
                f"attention_backend triton takes head sizes up to {LARGEST_HEAD}, not "
                f"{spec.head_dim}: use attention_backend reference"
            )
        shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        return zeros(shape, spec.stored, spec.device), zeros(shape, spec.stored, spec.device)

    def block_bytes(self, spec: KVSpec) -> int:
        elements = spec.block_size * spec.num_kv_heads * spec.head_dim
        return (1 if spec.latent else 2) * elements * spec.stored.itemsize + spec.index_bytes

    def copy_blocks(self, cache: LayerCache, copies: torch.Tensor) -> None:
        for part in map(raw, cache):
            part.index_copy_(0, copies[:, 1], part.index_select(0, copies[:, 0]))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> torch.Tensor:
        self._store(key, value, cache, metadata.slots, params)
        return self.attend(query, cache, metadata, params)

    def forward_qkv(
        self,
        rows: QKVRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> torch.Tensor:
        if not can_rotate(rows.qkv, rows.cos, rows.sin):
            parts = TorchOps().rotate_qkv(rows.qkv, rows.cos, rows.sin, rows.shape, rows.norm)
            return self.forward(*parts, cache, metadata, params)
        keys, values = cache
        target = StoreTarget(
            keys,
            values,
            metadata.slots,
            storage(keys.dtype, self._capability),
            params.key_scale,
            params.value_scale,
        )
        query = rotate_and_store(rows, target, self.dependent_launches)
        return self.attend(query, cache, metadata, params)

    def read_kv(
        self, cache: LayerCache, blocks: torch.Tensor, begin: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = cache[0].shape[2]
        first, last = begin // size, -(-end // size)
        keys, values = (
            raw(part)
            .index_select(0, blocks[first:last].long())
            .transpose(1, 2)
            .flatten(0, 1)[begin - first * size : end - first * size]
            .view(part.dtype)
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
        (tokens, heads, width), query = query.shape, _dense_heads(query)
        latents = latents if latents.stride(1) == 1 else latents.contiguous()
        output = query.new_empty(tokens, heads, rank)
        if not tokens:
            return output
        stored = storage(cache[0].dtype, self._capability)
        (part,) = stored.views(cache)
        store_latent_kernel[(tokens,)](
            latents, part, metadata.slots, 1.0 / params.key_scale, latents.stride(0),
            WIDTH=width, BLOCK=power_of_two(width), BITS=stored.as_bytes, LARGEST=stored.largest,
            num_warps=4,
        )  # fmt: skip
        launch = latent_launch(self._capability[0], query.element_size(), heads)
        least_part = split_keys(tokens, launch.keys)
        splits = latent_splits(tokens, metadata.max_seq_len, least_part)
        parts, sums = None, None
        if splits > 1:
            parts = self._scratch.take("parts", tokens * heads * splits * rank, query.device)
            sums = self._scratch.take("sums", tokens * heads * splits, query.device)
        runs = len(metadata.seq_lens)
        constants = {
            "HEADS": heads, "RANK": rank, "SPLITS": splits, "KEYS": launch.keys,
            "DIM": tile_extent(rank),
        }  # fmt: skip
        latent_kernel[(tokens, -(-heads // launch.rows), splits)](
            output, parts, sums, query, part, metadata.block_tables, metadata.query_start,
            metadata.seq_lens, runs, params.scale * params.key_scale, params.key_scale,
            query.stride(0), query.stride(1), metadata.block_tables.stride(0), least_part,
            **constants, ROTARY=width - rank, BLOCK_SIZE=part.shape[1], ROWS=launch.rows,
            ROTARY_DIM=tile_extent(width - rank), EXACT=dot_precision(query.element_size()),
            BITS=stored.as_bytes, num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
        if splits > 1:
            merge_latent_kernel[(tokens, heads)](
                output, parts, sums, metadata.query_start, metadata.seq_lens, runs, least_part,
                **constants, num_warps=merge_warps(tokens, rank),
            )  # fmt: skip
        return output

    def _store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        slots: torch.Tensor,
        params: LayerParams,
    ) -> None:
        key, value = _dense_heads(key), _dense_heads(value)
        _, kv_heads, block_size, dim = cache[0].shape
        stored = storage(cache[0].dtype, self._capability)
        store_kernel[(len(key),)](
            key, value, *stored.views(cache), slots,
            1.0 / params.key_scale, 1.0 / params.value_scale, key.stride(0), value.stride(0),
            KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_SIZE=block_size,
            HEADS=power_of_two(kv_heads), DIM=power_of_two(dim),
            BITS=stored.as_bytes, LARGEST=stored.largest, num_warps=4,
        )  # fmt: skip

    def attend(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> torch.Tensor:
        query, counted = _dense_heads(query), metadata.counts_decodes
        # Padding tokens of a captured step belong to no sequence.
        make = torch.zeros_like if counted else torch.empty_like
        output = make(query, memory_format=torch.contiguous_format)
        decodes = 0 if self._deterministic else metadata.num_decodes
        if decodes:
            self._decode(output, query, cache, metadata, params)
        if decodes < len(metadata.seq_lens):
            self._prefill(output, query, cache, metadata, params, decodes)
        return output

    def _decode(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> None:
        stored = storage(cache[0].dtype, self._capability)
        constants = _constants(query, cache, params, stored)
        dim, heads, kv_heads = query.shape[2], query.shape[1], cache[0].shape[1]
        rows = metadata.num_decodes
        chosen = self._launches.decode(rows)
        chosen = chosen or self.decode_launch(query.element_size(), dim, rows)
        launch = chosen.tile
        cut = {
            "least_part": chosen.part, "decode_count": metadata.decode_count,
            "MAX_SPLITS": MAX_SPLITS, "KEYS": launch.keys,
            "COUNTED": metadata.counts_decodes,
        }  # fmt: skip
        splits = _most_splits(metadata.max_seq_len, params.span, launch, chosen.part)
        whole = splits == 1
        merges = chosen.merges and not whole
        parts, sums = (None, None) if whole else self._parts(rows * heads, dim, query.device)
        arrived = self._scratch.counters(rows * kv_heads, query.device) if merges else None
        decode_kernel[(rows, kv_heads, splits)](
            output, parts, sums, arrived, query, *stored.views(cache), metadata.block_tables,
            metadata.seq_lens, params.sinks, params.scale * params.key_scale, params.value_scale,
            query.stride(0), query.stride(1), metadata.block_tables.stride(0),
            **constants, **cut, ROWS=max(launch.rows, power_of_two(heads // kv_heads)),
            WHOLE=whole, MERGE=merges, **self.dependent_launches.product,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
        if not whole and not merges:
            merge_kernel[(rows, heads)](
                output, parts, sums, metadata.seq_lens, params.sinks, HEADS=heads, HEAD_DIM=dim,
                **cut, WINDOW=constants["WINDOW"], DIM=constants["DIM"], SINKS=constants["SINKS"],
                **self.dependent_launches.small,
                num_warps=merge_warps(rows, dim),
            )  # fmt: skip

    def _parts(
        self, rows: int, dim: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocates scratch for the partial results of split keys, and for their softmax sums."""
        parts = self._scratch.take("parts", rows * MAX_SPLITS * dim, device)
        return parts, self._scratch.take("sums", rows * MAX_SPLITS, device)

    def _prefill(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
        decodes: int,
    ) -> None:
        kv_heads, group = cache[0].shape[1], query.shape[1] // cache[0].shape[1]
        table = self.prefill_launch(query.element_size(), query.shape[2])
        launch = self._launches.prefill or table
        rows = max(launch.rows, power_of_two(group))
        stored = storage(cache[0].dtype, self._capability)
        runs = len(metadata.seq_lens) - decodes
        counted = metadata.counts_decodes
        prompts = len(query) if counted else len(query) - decodes
        tiles = prompts // (rows // group) + runs
        prefill_kernel[(tiles, kv_heads)](
            output, query, *stored.views(cache), metadata.block_tables, metadata.query_start,
            metadata.seq_lens, params.sinks, metadata.decode_count, decodes, runs,
            params.scale * params.key_scale, params.value_scale,
            query.stride(0), query.stride(1), metadata.block_tables.stride(0),
            **_constants(query, cache, params, stored), ROWS=rows, KEYS=launch.keys,
            MASKED=self._deterministic, COUNTED=counted,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip


def _constants(
    query: torch.Tensor, cache: LayerCache, params: LayerParams, stored: Storage
) -> dict[str, Any]:
    """Compile-time constants of the kernels. A window or cap of 0 means none; a window below 0 is a
    chunk."""
    _, kv_heads, block_size, dim = cache[0].shape
    return {
        "GROUP": query.shape[1] // kv_heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": params.window_code,
        "SOFTCAP": params.softcap or 0.0,
        "DIM": tile_extent(dim),
        "EXACT": dot_precision(query.element_size()),
        "BITS": stored.as_bytes,
        "HALF": stored.largest > 0.0 and query.dtype is torch.bfloat16,
        "SINKS": params.sinks is not None,
    }


def _most_splits(max_seq_len: int, window: int | None, launch: Launch, part: int) -> int:
    """The largest number of parts into which a sequence of up to `max_seq_len` keys is split."""
    # A window's first tile may begin before the window does.
    span = max_seq_len if window is None else min(max_seq_len, window + launch.keys - 1)
    return min(MAX_SPLITS, -(-span // part))


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """Makes the heads of x [T, H, D] adjacent; tokens may have gaps between them."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()
