"""What a draft head and its target offer to the runner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ...checkpoints.checkpoint import Checkpoint, load_checkpoint
from ...core.attention_backend import LayerCache
from ...core.config import EngineConfig
from ..base import ForwardBatch, KVShape


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """The head to load. `checkpoint` and `quantization` are its own; None: it is part of the
    target's checkpoint."""

    method: Literal["mtp", "eagle3"]
    checkpoint: Checkpoint | None = None
    quantization: str = "none"

    @classmethod
    def of(cls, config: EngineConfig) -> "HeadOptions | None":
        """The head of an engine's configuration; None if it names none."""
        found = config.draft_head
        if found is None:
            return None
        if found.method == "mtp" or found.model is None:
            return cls("mtp")
        return cls("eagle3", load_checkpoint(found.model, found.revision), found.quantization)


@dataclass(frozen=True, slots=True)
class HeadStates:
    """Rows that a head computed. Logits are made of `normed`; a further draft reads `following` in
    place of the target's states."""

    following: torch.Tensor
    normed: torch.Tensor


class DraftHead(Protocol):
    """A loaded head. A row at position i reads the token at i + 1 and the state at i, and predicts
    the token at i + 2. The runner owns its KV cache."""

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """One entry for each layer."""

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """What the head reads [T, H] of the target's states [T, S]."""

    def forward(
        self, batch: ForwardBatch, hidden: torch.Tensor, caches: Sequence[LayerCache]
    ) -> HeadStates:
        """Computes the batch's tokens, which follow those of `hidden` [T, H], and writes their KV.
        Returns the rows that `logits_rows` names."""

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocabulary of the target] of rows [R, H]; minus infinity for tokens that the
        head does not know."""
