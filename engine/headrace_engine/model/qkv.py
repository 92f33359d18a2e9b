"""Attention that takes a layer's fused QKV rows as they are and rotates them itself.

A backend may offer it beside the protocol that all have; the decoder then saves a pass over keys
and values.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ..attention.base import AttentionMetadata, LayerCache, LayerParams
from .ops import HeadShape, QKNorm


@dataclass(frozen=True, slots=True)
class QKVRows:
    """Rows [T, (Hq + 2 Hkv) * D], and how to cut and rotate them, as in Ops.rotate_qkv."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    shape: HeadShape
    norm: QKNorm | None


@runtime_checkable
class QKVAttention(Protocol):
    def forward_qkv(
        self,
        rows: QKVRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> torch.Tensor:
        """What `forward` returns for the rotated rows; keys and values are written first."""
