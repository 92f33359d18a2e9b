"""The one protocol behind which every attention backend stands.

A backend owns the layout of its KV cache: the runner passes the tensors that `allocate` made back
to it and looks into none of them. Only that blocks are their first dimension is known outside.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch

LayerCache = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of one layer's keys and values. `dtype` is the model's; `cache_dtype` what the cache
    holds, None: the same."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    cache_dtype: torch.dtype | None = None

    @property
    def stored(self) -> torch.dtype:
        return self.cache_dtype or self.dtype


@dataclass(frozen=True, slots=True)
class LayerParams:
    """What a layer's attention needs beside the step's tensors. `sliding_window` counts keys, own
    included. Caches of 8-bit floats hold keys over `key_scale` and values over `value_scale`.
    `sinks` float32 [Hq] are logits that join each head's softmax without a value (gpt-oss)."""

    scale: float
    softcap: float | None = None
    sliding_window: int | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    sinks: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where each token of a ragged batch belongs. S sequences, T tokens, all on the device.

    query_start   int32 [S + 1]     token offsets of the sequences' runs
    seq_lens      int32 [S]         keys of each sequence, this step's included
    block_tables  int32 [S, B]      block ids, padded with 0 behind ceil(seq_len / block_size)
    slots         int64 [T]         block * block_size + offset, where each token's KV is written
    The first `num_decodes` sequences have one query token each.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int


class AttentionBackend(Protocol):
    name: ClassVar[str]

    def allocate(self, num_blocks: int, spec: KVSpec) -> LayerCache:
        """Zeroed KV memory of one layer for `num_blocks` blocks."""

    def block_bytes(self, spec: KVSpec) -> int:
        """Bytes that one block takes in one layer."""

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

        All is written before anything is read: a sequence may attend to what another one of the
        same step computes, in blocks that both share.
                query [T, Hq, D], key and value [T, Hkv, D] (rotary applied), Hq a multiple of Hkv.
        Returns [T, Hq, D] in the query's dtype.
        """


@runtime_checkable
class SkipsPadding(Protocol):
    """A backend whose steps can be recorded in CUDA graphs: it writes no token whose slot is below
    0, gives zeros for sequences without keys, and needs no number that only the device knows."""

    skips_padding: ClassVar[Literal[True]]


@runtime_checkable
class ReadsSomeBlocks(Protocol):
    """A backend for which the size of blocks matters."""

    def reads_blocks(self, block_size: int) -> bool:
        """Whether it reads blocks of this size where they lie, and does not gather them first."""
