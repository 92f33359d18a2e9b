"""Adapters of a mixture's experts by Triton's products: nothing here waits for the device, so steps
can be recorded. Rows are in the order of routing, in tiles of one expert each."""

from dataclasses import dataclass

import torch

from ..kernels.triton.dependent_launch import DependentLaunches
from ..kernels.triton.expert_lora import (
    expert_activate_kernel,
    expert_expand_kernel,
    expert_gather_kernel,
    expert_shrink_kernel,
)
from ..kernels.triton.launch import (
    EXPERT_LORA_BLOCK,
    EXPERT_LORA_RANKS,
    dot_precision,
    expert_lora_columns,
    expert_lora_depth,
    power_of_two,
    tile_extent,
)
from .batch import BlockLinear, LayerLoRA
from .tiles import TiledRows


@dataclass(frozen=True, slots=True)
class RoutedLoRA:
    """One mixture's adapters in a step. `order`, `tiles` and `live` as in Routing, in tiles of
    `rows` rows; a token has `per_token` pairs."""

    layer: LayerLoRA
    owners: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    live: torch.Tensor
    per_token: int
    rows: int
    dependent_launches: DependentLaunches

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers rows of tokens [T, width] as [pairs, width], in the order of their experts."""
        width, block = x.shape[1], _block(x.shape[1])
        output = x.new_empty(self.order.numel(), width)
        expert_gather_kernel[(self._capacity, -(-width // block))](
            output, x, self.order, self.tiles, self.live, x.stride(0), self._capacity,
            PER_TOKEN=self.per_token, WIDTH=width, ROWS=self.rows, BLOCK=block,
            **self.dependent_launches.small, num_warps=4,
        )  # fmt: skip
        return output

    def activated(self, gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
        """Activates rows of pairs [pairs, 2 width] to [pairs, width], in the order of their
        experts."""
        width = gate_up.shape[1] // 2
        block = _block(width)
        output = gate_up.new_empty(len(gate_up), width)
        expert_activate_kernel[(self._capacity, -(-width // block))](
            output, gate_up, self.order, self.tiles, self.live, self._capacity,
            WIDTH=width, GELU=gelu, ROWS=self.rows, BLOCK=block,
            **self.dependent_launches.small, num_warps=4,
        )  # fmt: skip
        return output

    def add(self, name: BlockLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds to rows of pairs y [pairs, out] their adapters' products with x [pairs, in], which
        is in the order of experts."""
        experts = self.layer.experts["experts_gate_up" if name == "gate_up" else "experts_down"]
        slots, count, ranks, inputs = experts.down.shape
        partial = torch.empty(len(x), ranks, dtype=torch.float32, device=x.device)
        layout = (experts.ranks, self.owners, self.order, self.tiles, self.live, self._capacity)
        usual = {
            "PER_TOKEN": self.per_token, "EXPERTS": count, "MAX_RANK": ranks, "ROWS": self.rows,
            "EXACT": dot_precision(x.element_size()), **self.dependent_launches.small,
            "num_warps": 4,
        }  # fmt: skip
        columns = min(EXPERT_LORA_RANKS, tile_extent(ranks))
        expert_shrink_kernel[(self._capacity, slots, -(-ranks // columns))](
            partial, x, experts.down, *layout, INPUTS=inputs, COLUMNS=columns,
            DEPTH=min(expert_lora_depth(x.element_size(), self.rows), tile_extent(inputs)),
            num_stages=3, **usual,
        )  # fmt: skip
        outputs = y.shape[1]
        width = expert_lora_columns(self.rows, outputs)
        expert_expand_kernel[(self._capacity, slots, -(-outputs // width))](
            y, partial, experts.up, *layout, OUTPUTS=outputs, COLUMNS=width,
            DEPTH=min(EXPERT_LORA_RANKS, tile_extent(ranks)), num_stages=1, **usual,
        )  # fmt: skip

    @property
    def _capacity(self) -> int:
        return self.tiles.shape[1]


def owners_of(layer: LayerLoRA) -> torch.Tensor:
    """int32 [T]: the slot of each row's adapter, below 0 if it has none."""
    rows = layer.rows
    assert isinstance(rows, TiledRows), "operators that join experts bring tiles for adapters"
    return rows.owners


def _block(width: int) -> int:
    return min(EXPERT_LORA_BLOCK, power_of_two(width))
