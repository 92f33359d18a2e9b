"""Caches values that all layers' attention needs and that are computed once per step."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from ..core.attention_backend import AttentionMetadata

Made = TypeVar("Made")


class StepCache(Generic[Made]):
    """Caches one value for each metadata of a step. Groups of layers have metadata of their own,
    but all have the same `seq_lens`, so a new `seq_lens` begins a new step."""

    def __init__(self) -> None:
        self._seq_lens: torch.Tensor | None = None
        self._made: dict[int, tuple[AttentionMetadata, Made]] = {}

    def of(self, metadata: AttentionMetadata, make: Callable[[AttentionMetadata], Made]) -> Made:
        """Caches make(metadata) for this step, and keeps metadata alive so that its id stays
        valid."""
        if self._seq_lens is not metadata.seq_lens:
            self._seq_lens = metadata.seq_lens
            self._made.clear()
        found = self._made.get(id(metadata))
        if found is None:
            found = self._made[id(metadata)] = metadata, make(metadata)
        return found[1]
