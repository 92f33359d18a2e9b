"""Finds the kind of attention that a transformers model needs, by running it on a few tokens.

The probe computes attention itself, without a cache, so that the shapes of the cache can be
determined before it is allocated.
"""

from typing import Any

import torch

from ...attention.reference import attend
from ...core.attention_backend import LayerParams
from ..base import KVShape

# Two sequences as one ragged batch: the model must respect position ids that restart.
SIZES = (5, 3)
# Arguments of the attention interface that have no effect here when they are off.
HARMLESS_IF_UNSET = ("s_aux", "position_bias", "head_mask", "attention_bias", "cache")


class Probe:
    """Collects each layer's shape by its module, in the order of the calls."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self.shapes: dict[int, KVShape] = {}
        self.windows: list[int | None] = []
        self.problem: str | None = None

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        params: LayerParams,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, None]:
        self._note(module, mask, options)
        self.shapes[id(module)] = KVShape(key.shape[1], key.shape[-1])
        self.windows.append(params.sliding_window)
        parts = [
            torch.split(part[0].transpose(0, 1), list(self._sizes)) for part in (query, key, value)
        ]
        attended = [attend(q, k.float(), v.float(), params) for q, k, v in zip(*parts, strict=True)]
        return torch.cat(attended).unsqueeze(0), None

    def _note(
        self, module: torch.nn.Module, mask: torch.Tensor | None, options: dict[str, Any]
    ) -> None:
        extra = [name for name in HARMLESS_IF_UNSET if options.get(name) is not None]
        if id(module) in self.shapes:
            self.problem = "one attention layer is used more than once"
        elif mask is not None:
            self.problem = "it makes an attention mask of its own"
        elif extra:
            self.problem = f"its attention needs {', '.join(extra)}"
        elif options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            self.problem = "its attention is not causal"


def probe_ids(
    vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """(ids [T], positions [T], lengths of the sequences)."""
    total = sum(SIZES)
    ids = (torch.arange(1, total + 1) * 7919) % vocab_size
    positions = torch.cat([torch.arange(size) for size in SIZES])
    return ids.to(device), positions.to(device), SIZES


def eager_logits(model: Any, ids: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """The logits of transformers' own attention for the same sequences, one at a time."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return torch.cat(
            [
                model(input_ids=part[None], use_cache=False).logits[0]
                for part in torch.split(ids, list(sizes))
            ]
        )
    finally:
        model.set_attn_implementation(ours)
