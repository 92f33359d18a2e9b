"""Mixtures of experts on CUDA devices, without a question to the device: rows are routed and laid
out there, and one launch multiplies those of all experts.

So a recorded step serves whatever routing its replay comes to.
"""

from dataclasses import dataclass

import torch

from ..attention.fp8 import WHOLE, Storage, is_fp8, storage
from ..lora.batch import LayerLoRA
from ..triton_kernels.experts import grouped_kernel, mix_kernel
from ..triton_kernels.launch import (
    AMPERE,
    EXPERT_ROWS,
    EXPERT_TILES,
    LinearLaunch,
    dot_precision,
    expert_launch,
    power_of_two,
)
from ..triton_kernels.routing import place_kernel, route_kernel
from .expert_weights import GROUP_MULTIPLE, GroupedWeight, MixtureParts

# Tokens that a program routes; elements of a row that one sums.
TOKENS, MIX_BLOCK = 32, 512


@dataclass(frozen=True, slots=True)
class Routing:
    """Of T tokens with K experts each, on the device.

    weights  float32 [T, K]
    order    int32 [T * K]: pairs (token * K + k), by expert
    tiles    int32 [3, most]: each one's expert, where in `order` it begins and its expert ends
    live     int32 [1]: how many tiles there are
    """

    weights: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    live: torch.Tensor


class GroupedMoe:
    """A mixture of experts as one. Adapters change nothing here.

    `capability` None asks the device. If `deterministic` a row's bits do not depend on the others.
    """

    can_be_recorded = True

    def __init__(
        self,
        parts: MixtureParts,
        *,
        deterministic: bool = False,
        capability: tuple[int, int] | None = None,
    ) -> None:
        self._router, self._shared, self._config = parts.router, parts.shared, parts.config
        self._gelu, self._deterministic = parts.gelu, deterministic
        self._gate_up, self._down = parts.weights.gate_up, parts.weights.down
        values = self._down.values
        self._capability = capability or _capability(values.device)
        self._stored = _storage(values.dtype, self._capability)

    def __call__(
        self, x: torch.Tensor, lora: LayerLoRA | None = None, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not len(x):
            return torch.empty_like(x)
        rows = x if x.stride(1) == 1 else x.contiguous()
        launch = self._launch(rows)
        routing = self.route(rows, launch.rows, slots)
        pairs, (hidden, inner) = routing.order.numel(), self._down.values.shape[1:]
        active = rows.new_empty(pairs, inner)
        self._multiply(active, rows, self._gate_up, routing, launch, gated=True)
        computed = rows.new_empty(pairs, hidden)
        self._multiply(computed, active, self._down, routing, launch, gated=False)
        return self._mix(rows, computed, routing.weights, slots)

    def route(self, x: torch.Tensor, tile_rows: int, slots: torch.Tensor | None = None) -> Routing:
        """Which experts compute the rows of x [T, H], in tiles of so many rows. Padding is computed
        by none: its weights, and what is behind the last tile in `order`, are left as they are."""
        logits = self._router(x)
        config, tokens = self._config, len(x)
        pairs, programs = tokens * config.per_token, -(-tokens // TOKENS)
        routing = Routing(
            weights=x.new_empty(tokens, config.per_token, dtype=torch.float32),
            order=x.new_empty(pairs, dtype=torch.int32),
            tiles=x.new_empty(3, most_tiles(pairs, config.count, tile_rows), dtype=torch.int32),
            live=x.new_empty(1, dtype=torch.int32),
        )
        alone = programs == 1
        choices = None if alone else x.new_empty(tokens, config.count, dtype=torch.uint8)
        counts = None if alone else x.new_empty(programs, config.count, dtype=torch.int32)
        layout = (routing.order, routing.tiles, routing.live)
        capacity, block = routing.tiles.shape[1], power_of_two(config.count)
        sizes = {
            "EXPERTS": config.count, "PER_TOKEN": config.per_token, "TOKENS": TOKENS,
            "BLOCK": block, "ROWS": tile_rows, "num_warps": min(16, max(4, block // 16)),
        }  # fmt: skip
        route_kernel[(programs,)](
            routing.weights, choices, counts, *layout, logits, slots, tokens, capacity,
            RENORMALISE=config.renormalise, PADDED=slots is not None, ALONE=alone, **sizes,
        )  # fmt: skip
        if not alone:
            place_kernel[(programs,)](*layout, choices, counts, tokens, programs, capacity, **sizes)
        return routing

    def _launch(self, x: torch.Tensor) -> LinearLaunch:
        average = len(x) * self._config.per_token / self._config.count
        wanted = None if self._deterministic else average
        return expert_launch(self._capability[0], x.element_size(), wanted)

    def _multiply(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        weight: GroupedWeight,
        routing: Routing,
        launch: LinearLaunch,
        gated: bool,
    ) -> None:
        (values,) = self._stored.views([weight.values])
        scales, outputs = weight.scales, output.shape[1]
        groups = 0 if scales is None else scales.shape[2]
        group = weight.group if groups > 1 else 0
        columns = _columns(launch, gated, group > 0)
        capacity = routing.tiles.shape[1]
        grouped_kernel[(capacity * -(-outputs // columns),)](
            output, x, values, scales, routing.order, routing.tiles, routing.live,
            x.stride(0), capacity,
            PER_TOKEN=self._config.per_token, INPUTS=x.shape[1], OUTPUTS=outputs,
            GATED=gated, GELU=self._gelu, SCALES=groups, GROUP=group, BITS=self._stored.bits,
            ROWS=launch.rows, COLUMNS=columns,
            DEPTH=min(GROUP_MULTIPLE, launch.depth) if group else launch.depth,
            TOGETHER=EXPERT_TILES,
            EXACT=dot_precision(x.element_size()),
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip

    def _mix(
        self,
        x: torch.Tensor,
        computed: torch.Tensor,
        weights: torch.Tensor,
        slots: torch.Tensor | None,
    ) -> torch.Tensor:
        shared, output = self._shared, torch.empty_like(x, memory_format=torch.contiguous_format)
        common = None if shared is None else shared.mlp(x)
        gate = None if shared is None else shared.gate(x)
        width = x.shape[1]
        block = min(MIX_BLOCK, power_of_two(width))
        mix_kernel[(len(x), -(-width // block))](
            output, computed, weights, common, gate, slots,
            WIDTH=width, PER_TOKEN=self._config.per_token, SHARED=shared is not None,
            PADDED=slots is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return output


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Tiles of so many rows that pairs may need, however they are spread over experts."""
    return (pairs + min(pairs, experts) * (rows - 1)) // rows


def _columns(launch: LinearLaunch, gated: bool, scaled: bool) -> int:
    """Outputs of a tile: gate and up are two, and sums that are scaled apart take as many registers
    again."""
    columns = launch.columns // 2 if gated else launch.columns
    return columns // 2 if scaled and launch.rows > EXPERT_ROWS[0] else columns


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else AMPERE


def _storage(dtype: torch.dtype, capability: tuple[int, int]) -> Storage:
    return storage(dtype, capability) if is_fp8(dtype) else WHOLE
