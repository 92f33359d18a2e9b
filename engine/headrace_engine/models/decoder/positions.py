"""Values that a decoder's layers derive from positions: rotations, and the scale of queries.

Equal layers share a table.
"""

from dataclasses import dataclass

import torch

from ...checkpoints.config import ModelConfig
from ...checkpoints.rope import QueryScaling, RopeConfig
from ..base import VisionRows
from ..rotary.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class LayerPositions:
    """cos and sin [T, rotated / 2] of a layer's tokens; the factor of their queries [T, 1], or
    None."""

    cos: torch.Tensor
    sin: torch.Tensor
    query_scale: torch.Tensor | None


class PositionTables:
    """Tables for positions below `length`."""

    def __init__(self, config: ModelConfig, length: int, device: torch.device) -> None:
        self._config, self._length, self._device = config, length, device
        ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        self._distinct: list[RopeConfig | None] = []
        for rope in ropes:
            if rope not in self._distinct:
                self._distinct.append(rope)
        self._tables = [self._table(rope) for rope in self._distinct]
        self._used = [self._distinct.index(rope) for rope in ropes]
        scaling = config.query_scaling
        self._query_scales = _query_scales(scaling, length, device)
        # Whether layers with each rotation scale their queries.
        self._scaled = [
            scaling is not None and not (scaling.unrotated and rope) for rope in self._distinct
        ]

    def query_scales_of(self, layer: int) -> torch.Tensor | None:
        """The factors of the layer's queries, float32 [positions, 1]; None if it has none."""
        return self._query_scales if self._scaled[self._used[layer]] else None

    def rotary(self, layer: int) -> RotaryTable | None:
        """The layer's rotation; None if it has none."""
        used = self._used[layer]
        return None if self._distinct[used] is None else self._tables[used]

    def reserve(self, positions: torch.Tensor) -> None:
        """Makes the rows of the tables for int64 positions [T], on CPUs."""
        long = [table for table in self._tables if not table.is_whole]
        if long:
            length = int(positions.max()) + 1
            for table in long:
                table.reserve(length)

    def lookup(
        self, positions: torch.Tensor, vision: VisionRows | None = None
    ) -> list[LayerPositions]:
        """One entry a layer, for int64 positions [T]. With M-RoPE rows in images are rotated by
        their three positions."""
        scales = self._query_scales
        scale = None if scales is None else scales.index_select(0, positions)
        found = []
        for table, scaled in zip(self._tables, self._scaled, strict=True):
            cos, sin = table.lookup(positions, vision)
            found.append(LayerPositions(cos, sin, scale if scaled else None))
        return [found[used] for used in self._used]

    def _table(self, rope: RopeConfig | None) -> RotaryTable:
        config = self._config
        if rope is None:
            width = config.rope.rotated(config.rotary_dim)
            return RotaryTable.unrotated(width, self._length, self._device)
        context = config.max_position_embeddings
        return RotaryTable(rope, config.rotary_dim, context, self._length, self._device)


def _query_scales(
    scaling: QueryScaling | None, length: int, device: torch.device
) -> torch.Tensor | None:
    """The factors of queries, float32 [length, 1]."""
    if scaling is None:
        return None
    contexts = (torch.arange(length, device=device) + scaling.offset) // scaling.context
    return 1 + scaling.beta * torch.log1p(contexts.float())[:, None]
