"""What is worked out once a step, though each layer's attention needs it."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from .base import AttentionMetadata

Made = TypeVar("Made")


class StepMemo(Generic[Made]):
    """One entry for each metadata of a step: groups of layers have their own, but all have the
    lengths of one batch."""

    def __init__(self) -> None:
        self._seq_lens: torch.Tensor | None = None
        self._made: dict[int, tuple[AttentionMetadata, Made]] = {}

    def of(self, metadata: AttentionMetadata, make: Callable[[AttentionMetadata], Made]) -> Made:
        """What `make` made of it is kept, and it, too, until the next step asks."""
        if self._seq_lens is not metadata.seq_lens:
            self._seq_lens = metadata.seq_lens
            self._made.clear()
        found = self._made.get(id(metadata))
        if found is None:
            found = self._made[id(metadata)] = metadata, make(metadata)
        return found[1]
