"""Paged attention on CUDA with Flash Attention kernels, reading KV blocks through a block table.

Uses the flash-attn package if it is installed, else the kernels that torch carries. If the kernel
cannot read pages of the cache's block size, keys and values are gathered first: this works for any
size, but moves more memory.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch.nn import functional as F

from ..core.attention_backend import AttentionMetadata, KVSpec, LayerCache, LayerParams
from ..core.errors import ConfigError
from .memory import zeros
from .reference import ReferenceBackend
from .step_cache import StepCache

# Flash Attention 2 refuses other page sizes: "block size must be divisible by 256".
PAGE_MULTIPLE = 256


@dataclass(frozen=True, slots=True)
class VarlenInputs:
    """One call of a kernel: either pages with a block table, or gathered keys and values."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_start: torch.Tensor
    key_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor | None
    max_query_len: int
    max_seq_len: int
    params: LayerParams

    @property
    def window(self) -> tuple[int, int]:
        """The numbers of keys to the left and to the right that a query sees; -1 means all."""
        window = self.params.sliding_window
        return (-1 if window is None else window - 1, 0)


class Kernel(Protocol):
    def pages(self, block_size: int) -> bool:
        """Whether the kernel can read blocks of this size through a block table."""

    def __call__(self, inputs: VarlenInputs) -> torch.Tensor:
        """Computes causal attention, aligned at the ends of query and keys: [T, Hq, D]. Includes
        sinks."""


class FlashAttnKernel:
    """flash-attn's flash_attn_varlen_func, version 2.6 or newer."""

    def __init__(self, varlen: Callable[..., Any]) -> None:
        self._varlen = varlen

    def pages(self, block_size: int) -> bool:
        return block_size % PAGE_MULTIPLE == 0

    def __call__(self, inputs: VarlenInputs) -> torch.Tensor:
        sinks = inputs.params.sinks
        found = self._varlen(
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.query_start,
            inputs.key_start,
            inputs.max_query_len,
            inputs.max_seq_len,
            softmax_scale=inputs.params.scale,
            causal=True,
            window_size=inputs.window,
            softcap=inputs.params.softcap or 0.0,
            block_table=inputs.block_tables,
            return_attn_probs=sinks is not None,
        )
        attended: torch.Tensor = found if sinks is None else _with_sinks(found[0], found[1], sinks)
        return attended


class TorchKernel:
    """torch.ops.aten._flash_attention_forward, as torch 2.13 has it.

    torch.nn.attention.varlen calls it, too, but its module imports torch._dynamo, which takes
    seconds. Only an activated Flash Attention 3 takes a block table, and then of any block size.
    """

    def __init__(self, forward: Callable[..., Any], implementation: str | None) -> None:
        self._forward, self._implementation = forward, implementation

    def pages(self, block_size: int) -> bool:
        return self._implementation == "FA3"

    def __call__(self, inputs: VarlenInputs) -> torch.Tensor:
        if inputs.params.softcap is not None:
            raise ConfigError(
                "torch's flash attention has no softcap, which this model needs: install "
                "headrace[flash-attn] or use attention_backend triton"
            )
        paged = inputs.block_tables is not None
        pages = {"seqused_k": inputs.seq_lens, "block_table": inputs.block_tables} if paged else {}
        sinks, (before, after) = inputs.params.sinks, inputs.window
        attended: torch.Tensor
        attended, sums, *_ = self._forward(
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.query_start,
            None if paged else inputs.key_start,
            inputs.max_query_len,
            inputs.max_seq_len,
            0.0,  # dropout
            before < 0,  # causal; with a window, its right edge says the same
            return_debug_mask=False,
            scale=inputs.params.scale,
            window_size_left=before,
            window_size_right=after,
            **pages,
        )
        return attended if sinks is None else _with_sinks(attended, sums, sinks)


def _with_sinks(attended: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Scales `attended` [T, Hq, D] down by the share of each head's sink. `sums` [Hq, T] are the
    logarithms of the softmax's sums without the sink."""
    share = torch.sigmoid(sums.T - sinks)[..., None]
    return (attended * share).to(attended.dtype)


class FlashBackend:
    """Flash Attention. Its cache is keys and values, each [blocks, block_size, Hkv, D].

    Raises ConfigError if neither kernel is available, or if the kernel lacks a softcap that the
    model needs.
    """

    name: ClassVar[str] = "flash"

    def __init__(self, kernel: Kernel | None = None) -> None:
        self._kernel = kernel if kernel is not None else find_kernel()
        self._key_slots = StepCache[torch.Tensor]()

    def reads_blocks(self, block_size: int) -> bool:
        return self._kernel.pages(block_size)

    def allocate(self, num_blocks: int, spec: KVSpec) -> LayerCache:
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return zeros(shape, spec.dtype, spec.device), zeros(shape, spec.dtype, spec.device)

    def block_bytes(self, spec: KVSpec) -> int:
        return 2 * spec.block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize

    def copy_blocks(self, cache: LayerCache, copies: torch.Tensor) -> None:
        for part in cache:
            part.index_copy_(0, copies[:, 1], part.index_select(0, copies[:, 0]))

    def read_kv(
        self, cache: LayerCache, blocks: torch.Tensor, begin: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ReferenceBackend().read_kv(cache, blocks, begin, end, dtype)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> torch.Tensor:
        for part, new in zip(cache, (key, value), strict=True):
            part.flatten(0, 1).index_copy_(0, metadata.slots, new)
        keys, values = cache
        tables: torch.Tensor | None = metadata.block_tables
        if not self._kernel.pages(keys.shape[1]):
            index = self._key_slots.of(metadata, partial(key_slots, block_size=keys.shape[1]))
            keys, values = (part.flatten(0, 1).index_select(0, index) for part in cache)
            tables = None
        return self._kernel(
            VarlenInputs(
                query=query.contiguous(),
                key=keys,
                value=values,
                query_start=metadata.query_start,
                key_start=F.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
                seq_lens=metadata.seq_lens,
                block_tables=tables,
                max_query_len=metadata.max_query_len,
                max_seq_len=metadata.max_seq_len,
                params=params,
            )
        )


def find_kernel() -> Kernel:
    """Finds flash-attn's kernel, else torch's. Raises ConfigError if there is neither."""
    try:
        return FlashAttnKernel(importlib.import_module("flash_attn").flash_attn_varlen_func)
    except ImportError:
        return _torch_kernel()


def _torch_kernel() -> TorchKernel:
    try:
        forward = torch.ops.aten._flash_attention_forward.default
        active = importlib.import_module("torch.nn.attention").current_flash_attention_impl()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "attention_backend flash needs headrace[flash-attn], or a torch with "
            f"flash attention: {error}"
        ) from error
    if "block_table" not in {argument.name for argument in forward._schema.arguments}:
        raise ConfigError(
            f"attention_backend flash needs headrace[flash-attn], or a newer torch than "
            f"{torch.__version__}"
        )
    return TorchKernel(forward, active)


def key_slots(metadata: AttentionMetadata, block_size: int) -> torch.Tensor:
    """int64 [sum of seq_lens]: the slots of all sequences' keys, one sequence after the other."""
    lengths = metadata.seq_lens.long()
    starts = lengths.cumsum(0) - lengths
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    position = torch.arange(owner.shape[0], device=lengths.device) - starts[owner]
    blocks = metadata.block_tables[owner, position // block_size].long()
    return blocks * block_size + position % block_size
