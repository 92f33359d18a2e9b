"""Rank 0's model: each forward pass is a forward pass of all ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..core.attention_backend import LayerCache
from ..core.kv_cache_groups import KVLayout
from ..models.base import CausalModel, ForwardBatch
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
