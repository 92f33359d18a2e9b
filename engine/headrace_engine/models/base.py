"""The interface between the runner and any implementation of a model, and a step's batch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from ..checkpoints.config import ModelConfig
from ..core.attention_backend import AttentionMetadata, KVSpec, LayerCache
from ..core.kv_cache_groups import KVLayout
from ..core.recurrent_state import StateBatch, StateLayout, StateTensor
from ..lora.batch import LoRABatch


@dataclass(frozen=True, slots=True)
class BidirectionalSpan:
    """Rows of a batch, all up to the end of an image, that see each other and all positions before.

    They are of the sequence with this index in the batch, from its position `first` on."""

    rows: slice
    sequence: int
    first: int


@dataclass(frozen=True, slots=True)
class VisionRows:
    """The V rows of a batch that are parts of images.

    rows        int64 [V]
    embeddings  [levels, V, hidden size]  the first replaces the token's own, the others are added
                                          to what the first layers return.
    positions   int64 [3, V]              frame, row and column, for rotations with M-RoPE; None
                                          without.
    spans                                 the rows that see later ones of their image.
    """

    rows: torch.Tensor
    embeddings: torch.Tensor
    positions: torch.Tensor | None
    spans: tuple[BidirectionalSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One ragged batch on the device: T tokens, of which R rows sample.

    input_ids   int64 [T]
    positions   int64 [T]   position of each token in its own sequence. After images it may be
                            less than the number of tokens before (M-RoPE).
    logits_rows int64 [R]   tokens whose logits are wanted.
    lora                    the adapters of its rows; None: no row has one.
    layers                  each layer's metadata, where not all have the same blocks.
    states                  the recurrent states of its sequences; None: the model has none.
    vision                  its rows in images; None: no row is in one.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_rows: torch.Tensor
    metadata: AttentionMetadata
    lora: LoRABatch | None = None
    layers: tuple[AttentionMetadata, ...] = ()
    states: StateBatch | None = None
    vision: VisionRows | None = None

    def metadata_of(self, layer: int) -> AttentionMetadata:
        return self.layers[layer] if self.layers else self.metadata


def of_groups(metadata: AttentionMetadata, layout: KVLayout) -> list[AttentionMetadata]:
    """Splits metadata with block tables [G, S, B] and slots [G, T] into one for each of the G
    groups; with one group the tensors have no dimension G."""
    if layout.groups.count == 1:
        return [metadata]
    places = zip(metadata.block_tables.unbind(0), metadata.slots.unbind(0), strict=True)
    return [replace(metadata, block_tables=tables, slots=slots) for tables, slots in places]


def of_layers(
    groups: Sequence[AttentionMetadata], layout: KVLayout
) -> tuple[AttentionMetadata, ...]:
    """The `layers` of a ForwardBatch, from each group's metadata."""
    return tuple(groups[group] for group in layout.layers) if len(groups) > 1 else ()


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one layer's keys and values. `latent` above 0: values are the first `latent`
    elements of keys, and are not stored. `indexed`: elements of an indexer's key of a position."""

    num_kv_heads: int
    head_dim: int
    latent: int = 0
    indexed: int = 0

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> "KVShape":
        """The shape of a decoder's layer. Values narrower than keys are padded to their width."""
        if config.latent is None:
            return cls(config.kv_heads(layer), config.head_dim)
        index = config.index_of(layer)
        indexed = 0 if index is None else index.width
        return cls(config.kv_heads(layer), config.head_dim, config.latent.rank, indexed)

    def spec(
        self,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None,
    ) -> KVSpec:
        """What an attention backend needs to know to allocate the layer's cache."""
        return KVSpec(
            self.num_kv_heads,
            self.head_dim,
            block_size,
            dtype,
            device,
            cache_dtype,
            self.latent,
            self.indexed,
        )


def kv_shapes(config: ModelConfig) -> tuple[KVShape, ...]:
    """The shapes of all layers of a decoder."""
    return tuple(KVShape.of(config, layer) for layer in range(config.num_layers))


class CausalModel(Protocol):
    """A loaded decoder. It owns its weights; the runner owns the KV caches."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """One entry for each layer."""

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Computes logits [R, vocab_size]; writes the keys and values of all T tokens into
        `caches`."""


@runtime_checkable
class RecurrentModel(CausalModel, Protocol):
    """A model with layers that have a state for each sequence. `kv_shapes` are of the others."""

    @property
    def state_tensors(self) -> tuple[StateTensor, ...]:
        """The state of one recurrent layer."""

    @property
    def num_state_layers(self) -> int: ...


def state_layout(model: RecurrentModel, block_bytes: int) -> StateLayout:
    """Where the states of the model's layers lie in blocks of `block_bytes` a layer with KV."""
    places = len(model.kv_shapes)
    return StateLayout(model.state_tensors, model.num_state_layers, places, block_bytes)


@runtime_checkable
class SharedModel(CausalModel, Protocol):
    """A model around a part that this process computes: other processes may hold further parts."""

    @property
    def part(self) -> CausalModel:
        """This process's part, whose steps are recorded."""

    def with_part(self, part: CausalModel) -> CausalModel:
        """The model with this process's part replaced."""

    def recording(self, max_model_len: int, *, keep: bool) -> AbstractContextManager[None]:
        """Within the block, the other processes record their parts, too, and keep them if
        `keep`."""
