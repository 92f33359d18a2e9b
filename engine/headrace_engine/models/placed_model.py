"""A model on its device, with the attention backend and the operators that compute it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..core.attention_backend import AttentionBackend, KVSpec, LayerCache
from ..core.config import EngineConfig
from ..core.errors import ConfigError
from ..core.kv_cache_groups import KVLayout
from ..core.pooler_config import PoolerConfig
from ..kv_cache.memory_budget import Profile, count_blocks
from ..lora.adapter import AdapterWeights
from ..lora.shapes import LayerShapes
from ..operators.base import Ops
from .base import CausalModel, KVShape
from .draft_heads.base import DraftHead
from .vision.tower import VisionTower


class PeerRanks(Protocol):
    """The other ranks of a model that several processes share: each repeats this rank's actions."""

    def allocate(self, num_blocks: int, head_blocks: int) -> None: ...

    def reserve_host(self, num_blocks: int) -> None:
        """Takes KV blocks in host memory."""

    def zero_blocks(self, blocks: Sequence[int]) -> None: ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None: ...

    def copy_head_blocks(self, copies: Sequence[tuple[int, int]]) -> None: ...

    def swap(
        self, swap_out: Sequence[tuple[int, int]], swap_in: Sequence[tuple[int, int]]
    ) -> None: ...

    def allocate_adapters(self, experts: bool) -> None:
        """Takes memory for adapters; `experts`: also for adapters that change the experts of
        mixtures."""

    def put_adapter(
        self, slot: int, shapes: Sequence[LayerShapes], weights: AdapterWeights
    ) -> None:
        """Writes each rank's part of an adapter into a slot."""

    def smallest(
        self,
        count: Callable[[Profile], int],
        profile: Profile,
        max_model_len: int,
    ) -> int:
        """The smallest result of `count(profile)` on any rank."""

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Calls `on_failure`, from any thread, when a rank fails."""

    def on_drain(self, callback: Callable[[], object]) -> None:
        """Calls `callback`, from any thread, when the engine should drain since ranks will end."""

    def close(self) -> None:
        """Ends the ranks."""


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A loaded model. `layout` is that of the KV cache.

    `peers` have the other parts of the model; None if this process has all of it. `cache_dtype` is
    the dtype of stored KV; None means `dtype`. `lora_shapes` are the layers that adapters may
    change; None if adapters are off. `draft_head` proposes drafts; the layers of its KV cache
    follow the model's, in the same blocks. `tower` encodes images; None: the model reads none.
    """

    model: CausalModel
    attention: AttentionBackend
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    max_model_len: int
    layout: KVLayout
    pooler_config: PoolerConfig | None = None
    peers: PeerRanks | None = None
    cache_dtype: torch.dtype | None = None
    lora_shapes: tuple[LayerShapes, ...] | None = None
    draft_head: DraftHead | None = None
    tower: VisionTower | None = None

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """One entry for each layer, the draft head's last."""
        head = self.draft_head
        return self.model.kv_shapes if head is None else (*self.model.kv_shapes, *head.kv_shapes)

    def allocate(
        self, num_blocks: int, block_size: int, head_blocks: int = 0
    ) -> tuple[LayerCache, ...]:
        """Allocates zeroed KV memory: one entry a layer, shared by layers of the same place. For a
        layer with smaller blocks it consists of parts of blocks. The draft head's layers get
        `head_blocks` more blocks."""
        if self.peers is not None:
            self.peers.allocate(num_blocks, head_blocks)
        specs, own = self._specs(block_size), len(self.model.kv_shapes)
        memory = [
            self.attention.allocate(num_blocks + (head_blocks if layer >= own else 0), spec)
            for layer, spec in zip(self.layout.layer_of_each_place, specs, strict=True)
        ]
        caches = [memory[place] for place in self.layout.places]
        if self.layout.parts:
            caches = [
                self._in_parts(cache, shape, block_size)
                for cache, shape in zip(caches, self.kv_shapes, strict=True)
            ]
        return tuple(caches)

    def _in_parts(self, cache: LayerCache, shape: KVShape, block_size: int) -> LayerCache:
        """The memory as smaller blocks, of this shape."""
        own = self.attention.allocate(1, self._spec(shape, block_size))
        return tuple(
            whole.view(-1, *one.shape[1:]) if one.numel() else whole
            for whole, one in zip(cache, own, strict=True)
        )

    def _whole_blocks(self, caches: Sequence[LayerCache], layer: int) -> LayerCache:
        """The memory of a layer as blocks that are not divided."""
        if not self.layout.parts:
            return caches[layer]
        parts = self.layout.parts[self.layout.layers[layer]]
        return tuple(
            part.view(-1, parts * part.shape[1], *part.shape[2:]) if part.numel() else part
            for part in caches[layer]
        )

    def head_block_bytes(self, block_size: int) -> int:
        """Bytes of one block in the draft head's layers."""
        return sum(
            self.attention.block_bytes(spec)
            for layer, spec in zip(
                self.layout.layer_of_each_place, self._specs(block_size), strict=True
            )
            if layer >= len(self.model.kv_shapes)
        )

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block in all layers of a group."""
        return sum(self.attention.block_bytes(spec) for spec in self._specs(block_size))

    def sequence_blocks(self, block_size: int, max_model_len: int) -> int:
        """The number of blocks that the longest sequence needs if none is freed."""
        groups = self.layout.groups
        return -(-max_model_len // block_size) * groups.count + groups.state

    def zero_blocks(self, caches: tuple[LayerCache, ...], blocks: tuple[int, ...]) -> None:
        """Zeroes whole blocks in all layers, before KV is written into what held a state."""
        if self.peers is not None:
            self.peers.zero_blocks(blocks)
        index = torch.tensor(blocks, device=self.device)
        for layer in self.layout.layer_of_each_place:
            for part in caches[layer]:
                part.view(torch.uint8).index_fill_(0, index, 0)

    def copy_blocks(
        self, caches: tuple[LayerCache, ...], copies: tuple[tuple[int, int], ...]
    ) -> None:
        """Copies whole (source, destination) blocks in all layers of their groups."""
        if self.peers is not None:
            self.peers.copy_blocks(copies)
        pairs = self._pairs(copies)
        for layer in self.layout.layer_of_each_place:
            self.attention.copy_blocks(self._whole_blocks(caches, layer), pairs)

    def copy_head_blocks(
        self, caches: tuple[LayerCache, ...], copies: tuple[tuple[int, int], ...]
    ) -> None:
        """Copies (source, destination) blocks of the draft head's `caches` alone."""
        if self.peers is not None:
            self.peers.copy_head_blocks(copies)
        pairs = self._pairs(copies)
        for cache in caches:
            self.attention.copy_blocks(cache, pairs)

    def _pairs(self, copies: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """Copies [n, 2] on the device."""
        return torch.from_numpy(np.array(copies, dtype=np.int64)).to(self.device)

    def count_blocks(
        self,
        config: EngineConfig,
        bytes_per_block: int,
        max_model_len: int,
        profile: Profile,
    ) -> int:
        """How many KV blocks fit on every rank. Raises ConfigError if none does."""

        def count(run: Profile) -> int:
            sequence = self.sequence_blocks(config.block_size, max_model_len)
            return count_blocks(config, self.device, bytes_per_block, sequence, run)

        if self.peers is None:
            return count(profile)
        blocks = self.peers.smallest(count, profile, max_model_len)
        if blocks < 1:
            raise ConfigError("a rank has no room for one KV block: its log says how much it needs")
        return blocks

    def _specs(self, block_size: int) -> list[KVSpec]:
        """One spec for each place: that of the largest blocks, if layers have smaller ones."""
        shapes, layout = self.kv_shapes, self.layout
        if layout.parts:
            widest = layout.layer_of_each_group[layout.parts.index(1)]
            shapes = (shapes[widest],) * len(shapes)
        return [self._spec(shapes[layer], block_size) for layer in layout.layer_of_each_place]

    def _spec(self, shape: KVShape, block_size: int) -> KVSpec:
        return shape.spec(block_size, self.dtype, self.device, self.cache_dtype)
