"""Models that embed texts and images into one space (CLIP, SigLIP). Their vision tower computes
images, as for decoders; here are texts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ...core.attention_backend import LayerCache
from ..base import ForwardBatch
from .transformers_encoder import TransformersEncoder


class DualEncoder(TransformersEncoder):
    """Each token's state [R, size] is the vector of its text or image.

    With `length` texts are padded to as many tokens, which the model attends to, as it was trained.
    """

    def __init__(self, model: Any, padding: int, length: int | None) -> None:
        super().__init__(model, padding)
        self._length = length

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        if batch.vision is None:
            return super().forward(batch, caches)
        starts = batch.metadata.query_start.tolist()
        prompts = torch.split(batch.input_ids, batch.metadata.query_start.diff().tolist())
        rows = set(batch.vision.rows.tolist())
        of_images = [start in rows for start in starts[:-1]]
        pairs = list(zip(prompts, of_images, strict=True))
        texts = iter(self.encode([prompt for prompt, is_image in pairs if not is_image]))
        lengths = [len(prompt) for prompt, is_image in pairs if is_image]
        images = iter(torch.split(batch.vision.embeddings[0], lengths))
        states = [next(images if is_image else texts) for is_image in of_images]
        return torch.cat(states).index_select(0, batch.logits_rows)

    def _states(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        if self._length is None:
            output = self._model.get_text_features(input_ids=ids, attention_mask=real.long())
        else:
            padded = F.pad(ids, (0, self._length - ids.shape[1]), value=self._padding)
            output = self._model.get_text_features(input_ids=padded)
        vectors: torch.Tensor = output.pooler_output
        return vectors[:, None].expand(-1, ids.shape[1], -1)
