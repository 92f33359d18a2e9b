"""Rank 0's model and draft head: each forward pass is a forward pass of all ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..core.attention_backend import LayerCache
from ..core.kv_cache_groups import KVLayout
from ..models.base import CausalModel, ForwardBatch
from ..models.draft_heads.base import DraftHead, HeadStates
from .rank_processes import RankProcesses


class RankZeroModel:
    """Runs `part`, this rank's part, together with the parts of the other ranks. The KV caches of
    all ranks have `layout`."""

    def __init__(self, part: CausalModel, peers: RankProcesses, layout: KVLayout) -> None:
        self.part, self._peers, self._layout = part, peers, layout
        # The other ranks have the same shapes.
        self.vocab_size, self.kv_shapes = part.vocab_size, part.kv_shapes

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Computes a step on all ranks. Raises RankFailed if another rank stopped."""
        with self._peers.step():
            self._peers.forward(batch, self._layout)
            return self.part.forward(batch, caches)

    def with_part(self, part: CausalModel) -> CausalModel:
        return RankZeroModel(part, self._peers, self._layout)

    @contextmanager
    def recording(self, max_model_len: int, *, keep: bool) -> Iterator[None]:
        """Each rank captures the same steps of its own part, including collectives. Graphs that are
        not kept are measured; the other ranks use the result to compute how many KV blocks fit."""
        with self._peers.step():
            self._peers.record(max_model_len, keep)
            yield


class RankZeroHead:
    """Runs `part`, this rank's part of a draft head, together with the parts of the other ranks."""

    def __init__(self, part: DraftHead, peers: RankProcesses) -> None:
        self._part, self._peers, self.kv_shapes = part, peers, part.kv_shapes

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        return self._part.combine(states)

    def forward(
        self, batch: ForwardBatch, hidden: torch.Tensor, caches: Sequence[LayerCache]
    ) -> HeadStates:
        with self._peers.step():
            self._peers.run_head(batch, hidden)
            return self._part.forward(batch, hidden, caches)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        with self._peers.step():
            self._peers.make_head_logits(normed)
            return self._part.logits(normed)
