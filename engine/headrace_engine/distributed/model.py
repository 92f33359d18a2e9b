"""Rank 0's model: each forward pass is one of all ranks."""

from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch

from ..attention.base import LayerCache
from ..kv_groups import KVLayout
from ..model.base import CausalModel, ForwardBatch, KVShape
from .peers import Peers


class LeadingModel:
    """`own` is this rank's part, whose collectives need the others. All ranks' KV caches have
    `layout`."""

    def __init__(self, own: CausalModel, peers: Peers, layout: KVLayout) -> None:
        self._own, self._peers, self._layout = own, peers, layout

    @property
    def vocab_size(self) -> int:
        return self._own.vocab_size

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Of this rank; the others' are alike."""
        return self._own.kv_shapes

    def forward(self, batch: ForwardBatch, caches: Rows[LayerCache]) -> torch.Tensor:
        """Raises RankFailed where another rank broke off."""
        with self._peers.step():
            self._peers.forward(batch, self._layout)
            return self._own.forward(batch, caches)

    def recorded(
        self, record: Callable[[CausalModel], CausalModel], max_model_len: int
    ) -> CausalModel:
        """Each rank records the same steps of its own part, collectives included."""
        with self._peers.step():
            self._peers.record(max_model_len)
            return LeadingModel(record(self._own), self._peers, self._layout)

    def measured(self, measure: Callable[[CausalModel], int], max_model_len: int) -> int:
        """Each rank records some steps of its own part and gives them up; others keep what they
        found for when they are asked how many KV blocks they have room for."""
        with self._peers.step():
            self._peers.rehearse(max_model_len)
            return measure(self._own)
