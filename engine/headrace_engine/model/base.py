"""What the runner needs of a model, whichever way it is implemented, and the batch it is given."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from ..attention.base import AttentionMetadata, LayerCache
from ..kv_groups import KVLayout
from ..lora.batch import LoRABatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One ragged batch on the device: T tokens, of which R rows sample.

    input_ids   int64 [T]
    positions   int64 [T]   position of each token in its own sequence
    logits_rows int64 [R]   tokens whose logits are wanted
    lora                    the adapters of its rows; None: no row has one
    layers                  each layer's metadata, where not all have the same blocks
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_rows: torch.Tensor
    metadata: AttentionMetadata
    lora: LoRABatch | None = None
    layers: tuple[AttentionMetadata, ...] = ()

    def metadata_of(self, layer: int) -> AttentionMetadata:
        return self.layers[layer] if self.layers else self.metadata


def of_groups(metadata: AttentionMetadata, layout: KVLayout) -> list[AttentionMetadata]:
    """Each group's metadata, of one with block tables [G, S, B] and slots [G, T] of G groups, or
    without that dimension where there is but one."""
    if layout.groups.count == 1:
        return [metadata]
    places = zip(metadata.block_tables.unbind(0), metadata.slots.unbind(0), strict=True)
    return [replace(metadata, block_tables=tables, slots=slots) for tables, slots in places]


def of_layers(groups: Rows[AttentionMetadata], layout: KVLayout) -> tuple[AttentionMetadata, ...]:
    """What a ForwardBatch has as `layers`, by each group's metadata."""
    return tuple(groups[group] for group in layout.layers) if len(groups) > 1 else ()


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one layer."""

    num_kv_heads: int
    head_dim: int


class CausalModel(Protocol):
    """A loaded decoder. Owns its weights; the KV caches are the runner's."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """One entry a layer."""

    def forward(self, batch: ForwardBatch, caches: Rows[LayerCache]) -> torch.Tensor:
        """Logits [R, vocab_size]; writes the keys and values of all T tokens into `caches`."""


@runtime_checkable
class SharedModel(CausalModel, Protocol):
    """A model whose parts several processes hold."""

    def recorded(
        self, record: Callable[[CausalModel], CausalModel], max_model_len: int
    ) -> CausalModel:
        """The model with this process's part replaced by `record` of it, as all others do."""

    def measured(self, measure: Callable[[CausalModel], int], max_model_len: int) -> int:
        """What `measure` gives for this process's part, while all others measure theirs."""
