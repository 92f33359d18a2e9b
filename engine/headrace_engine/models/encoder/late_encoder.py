"""Models of late interaction whose tokens attend in both directions (ColPali)."""

from collections.abc import Sequence
from typing import Any

import torch

from ...core.attention_backend import LayerCache
from ..base import ForwardBatch
from .transformers_encoder import TransformersEncoder


class LateEncoder(TransformersEncoder):
    """Each token's state [R, size] is its vector. The embeddings of images replace those of their
    tokens; a vision tower has made them."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, padding=0)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        rows: torch.Tensor = self._model.vlm.get_input_embeddings()(batch.input_ids)
        if batch.vision is not None:
            embeddings = batch.vision.embeddings[0].to(rows.dtype)
            rows = rows.index_copy(0, batch.vision.rows, embeddings)
        lengths = batch.metadata.query_start.diff().tolist()
        return torch.cat(self.encode(torch.split(rows, lengths))).index_select(0, batch.logits_rows)

    def _states(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The vectors of padded prompts, of which `ids` are the embeddings [prompts, length, H]."""
        states = self._model.vlm(
            inputs_embeds=ids,
            attention_mask=real.long(),
            token_type_ids=torch.zeros_like(real, dtype=torch.long),  # all see each other
        ).last_hidden_state
        vectors: torch.Tensor = self._model.embedding_proj_layer(states)
        return vectors
