"""Attention that takes a layer's fused QKV rows as they are and rotates them itself.

A backend may offer it in addition to the protocol of all backends; the decoder then saves a pass
over keys and values.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ..core.attention_backend import AttentionMetadata, LayerCache, LayerParams
from .base import HeadShape, QKNorm


@dataclass(frozen=True, slots=True)
class QKVRows:
    """Rows [T, (Hq + 2 Hkv) * D], and how to split and rotate them, as in Ops.rotate_qkv."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    shape: HeadShape
    norm: QKNorm | None


@runtime_checkable
class QKVAttention(Protocol):
    """An attention backend that takes fused QKV rows."""

    def forward_qkv(
        self,
        rows: QKVRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> torch.Tensor:
        """Returns what `forward` returns for the rotated rows; first writes keys and values."""
