"""The protocol of attention backends.

A backend owns the layout of its KV cache: the runner passes the tensors made by `allocate` back to
it and does not interpret them, except that their first dimension is the block.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch

from .errors import ConfigError

LayerCache = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of one layer's keys and values.

    `dtype` is the model's, `cache_dtype` the cache's (None: the same). `latent` above 0: values
    are the first `latent` elements of the keys of the only KV head; only keys are stored, and
    LatentBackend computes. `indexed` above 0: the last tensor of the cache is an indexer's keys,
    [blocks, block_size, indexed] in `dtype`.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    cache_dtype: torch.dtype | None = None
    latent: int = 0
    indexed: int = 0

    @property
    def index_bytes(self) -> int:
        """Bytes of an indexer's keys in one block."""
        return self.block_size * self.indexed * self.dtype.itemsize

    @property
    def stored(self) -> torch.dtype:
        return self.cache_dtype or self.dtype


@dataclass(frozen=True, slots=True)
class LayerParams:
    """Parameters of one layer's attention.

    `sliding_window` counts keys, including the position's own. With `chunk`, positions form chunks
    of that size, and each sees the keys of its own chunk alone (Llama 4); `sliding_window` is None
    then. Caches of 8-bit floats hold keys divided by `key_scale` and values divided by
    `value_scale`. `sinks` float32 [Hq] are logits that join each head's softmax without a value
    (gpt-oss).
    """

    scale: float
    softcap: float | None = None
    sliding_window: int | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    sinks: torch.Tensor | None = field(default=None, compare=False)
    chunk: int | None = None

    @property
    def span(self) -> int | None:
        """The most keys that a position sees; None if there is no limit."""
        return self.sliding_window if self.chunk is None else self.chunk

    @property
    def window_code(self) -> int:
        """The limit as kernels take it: 0 for none, a sliding window, or minus a chunk's size."""
        return (self.sliding_window or 0) if self.chunk is None else -self.chunk


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The layout of a ragged batch of S sequences and T tokens. All tensors are on the device.

    query_start   int32 [S + 1]     token offsets of the sequences' runs.
    seq_lens      int32 [S]         keys of each sequence, this step's included.
    block_tables  int32 [S, B]      block ids, padded with 0 after ceil(seq_len / block_size).
    slots         int64 [T]         block * block_size + offset, where each token's KV is written.
    The first `num_decodes` sequences have one query token each. In a recorded step `num_decodes` is
    a bound, and `decode_count`, int32 [1], is their number; the sequences after them, at most
    S - `num_decodes`, may have any number of tokens.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    decode_count: torch.Tensor | None = None

    @property
    def counts_decodes(self) -> bool:
        """Whether only the device knows the number of decodes."""
        return self.decode_count is not None


class AttentionBackend(Protocol):
    name: ClassVar[str]

    def allocate(self, num_blocks: int, spec: KVSpec) -> LayerCache:
        """Zeroed KV memory of one layer for `num_blocks` blocks."""

    def block_bytes(self, spec: KVSpec) -> int:
        """Bytes of one block in one layer."""

    def copy_blocks(self, cache: LayerCache, copies: torch.Tensor) -> None:
        """Copies whole blocks; `copies` is int64 [N, 2] of (source, destination)."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> torch.Tensor:
        """Writes key and value at `slots`, then attends causally over each sequence's blocks.

        All tokens are written before any is read: a sequence may attend to keys that another one
        computes in the same step, in blocks that both share. `query` is [T, Hq, D]; `key` and
        `value` are [T, Hkv, D] with rotary applied; Hq is a multiple of Hkv. Returns [T, Hq, D] in
        the query's dtype.
        """


@runtime_checkable
class LatentBackend(Protocol):
    """A backend that attends to latents, which are the keys and the values of all heads (MLA)."""

    def forward_latent(
        self,
        query: torch.Tensor,
        latents: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
        rank: int,
    ) -> torch.Tensor:
        """Like AttentionBackend.forward, for keys `latents` [T, D] that all heads share, of which
        values are the first `rank` elements. query [T, H, D]; returns [T, H, rank]."""


@runtime_checkable
class ReadsKV(Protocol):
    """A backend that returns the keys and values of its cache."""

    def read_kv(
        self,
        cache: LayerCache,
        blocks: torch.Tensor,
        begin: int,
        end: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [end - begin, Hkv, D] of the positions from `begin` to `end` of one
        sequence, as they are stored. `dtype` is that of queries."""


@runtime_checkable
class AttendsInChunks(Protocol):
    """A backend that supports LayerParams.chunk."""

    attends_in_chunks: ClassVar[Literal[True]]


def chunk_backend(backend: AttentionBackend) -> AttentionBackend:
    """The backend itself. Raises ConfigError if it does not attend in chunks."""
    if not isinstance(backend, AttendsInChunks):
        raise _does_not_attend(backend, "in chunks")
    return backend


def latent_backend(backend: AttentionBackend) -> LatentBackend:
    """The backend itself. Raises ConfigError if it does not attend to latents."""
    if not isinstance(backend, LatentBackend):
        raise _does_not_attend(backend, "to latents (MLA)")
    return backend


def _does_not_attend(backend: AttentionBackend, how: str) -> ConfigError:
    name = f"attention_backend {backend.name}"
    return ConfigError(f"{name} does not attend {how}: use attention_backend auto")


@runtime_checkable
class SkipsPadding(Protocol):
    """A backend whose steps can be recorded in CUDA graphs.

    It skips tokens whose slot is negative, returns zeros for sequences without keys, and reads no
    value back from the device."""

    skips_padding: ClassVar[Literal[True]]


@runtime_checkable
class CountsDecodes(SkipsPadding, Protocol):
    """A backend that reads a step's `decode_count` on the device: so one recording serves every
    mixture of prompts and decodes."""

    counts_decodes: ClassVar[Literal[True]]


@runtime_checkable
class ReadsSomeBlocks(Protocol):
    """A backend that may or may not read blocks in place, depending on their size."""

    def reads_blocks(self, block_size: int) -> bool:
        """Whether it reads blocks of this size in place, without gathering them first."""
