"""The interface of draft heads."""

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
    """The head to load. `checkpoint` is None if the head is part of the target's checkpoint;
    otherwise `quantization` says how the head's linear layers are quantised."""

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
    """Rows [R, H] that a head computed. `normed` is the input of `logits`. For the next draft,
    `hidden` takes the place of the target's states."""

    hidden: torch.Tensor
    normed: torch.Tensor


class DraftHead(Protocol):
    """A loaded head. It computes the row of position i from the token at i + 1 and the target's
    state at i; the row predicts the token at i + 2. The runner owns the head's KV cache."""

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """One entry for each layer."""

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """The head's input [T, H], made from the target's states [T, S]."""

    def forward(
        self, batch: ForwardBatch, hidden: torch.Tensor, caches: Sequence[LayerCache]
    ) -> HeadStates:
        """Computes a row for each token of the batch and writes its KV. `hidden` [T, H] has the
        state before each token. Returns the rows that `logits_rows` names."""

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocabulary of the target] of rows [R, H]; minus infinity for tokens that the
        head does not know."""
