"""A model whose steps also leave the hidden states that a draft head reads."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from ...core.attention_backend import LayerCache
from ...core.recurrent_state import StateTensor
from ..base import CausalModel, ForwardBatch, SharedModel

# Computes logits from normed hidden states.
ToLogits = Callable[[torch.Tensor], torch.Tensor]


class HeadTarget:
    """A model of two parts. `part` returns the states [T, S] of every token; `to_logits` reads the
    first `hidden_size` elements of a state. A part with CUDA graphs can replace `part`."""

    def __init__(
        self,
        part: CausalModel,
        to_logits: ToLogits,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.part, self._to_logits = part, to_logits
        self.vocab_size, self.kv_shapes = vocab_size, part.kv_shapes
        self._hidden_size, self._dtype = hidden_size, dtype
        # The states of the last step, valid until the next one.
        self.states = torch.empty(0, hidden_size, dtype=dtype)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        count = len(batch.input_ids)
        every = batch.logits_rows
        if len(every) != count:
            every = torch.arange(count, device=every.device)
        self.states = self.part.forward(replace(batch, logits_rows=every), caches).to(self._dtype)
        rows = self.states[:, : self._hidden_size]
        if every is not batch.logits_rows:
            rows = rows.index_select(0, batch.logits_rows)
        return self._to_logits(rows.contiguous())

    def with_part(self, part: CausalModel) -> "HeadTarget":
        return HeadTarget(part, self._to_logits, self.vocab_size, self._hidden_size, self._dtype)

    def recording(self, max_model_len: int, *, keep: bool) -> AbstractContextManager[None]:
        return nullcontext()


class RecurrentHeadTarget(HeadTarget):
    """A target with recurrent layers, which have a state for each sequence."""

    def __init__(
        self,
        part: CausalModel,
        to_logits: ToLogits,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        state_tensors: tuple[StateTensor, ...],
        num_state_layers: int,
    ) -> None:
        super().__init__(part, to_logits, vocab_size, hidden_size, dtype)
        self.state_tensors, self.num_state_layers = state_tensors, num_state_layers


def find_target(model: CausalModel) -> HeadTarget:
    """The target in a model, of which other processes may have further parts."""
    while not isinstance(model, HeadTarget):
        assert isinstance(model, SharedModel), "a model with a head leaves its states"
        model = model.part
    return model
