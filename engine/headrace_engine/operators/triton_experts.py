"""Mixtures of experts on CUDA devices. Rows are routed and sorted on the device, without a copy to
the host, and one launch multiplies the rows of all experts.

So a recorded step is valid for any routing when it is replayed.
"""

import torch

from ..kernels.triton.dependent_launch import DependentLaunches
from ..kernels.triton.experts import grouped_kernel, mix_kernel
from ..kernels.triton.launch import (
    AMPERE,
    EXPERT_ROWS,
    EXPERT_TILES,
    ExpertLaunch,
    LinearLaunch,
    dot_precision,
    expert_candidates,
    expert_launch,
    power_of_two,
)
from ..kernels.triton.packed_launch import packed_tile, packed_tiles
from ..kernels.triton.routing import place_kernel, route_kernel
from ..layers.expert_weights import GROUP_MULTIPLE, GroupedWeight, MixtureParts
from ..layers.fp8_cache import NOT_FP8, Storage, is_fp8, storage
from ..layers.packed_weights import GroupedPackedWeight
from ..layers.routing import Routing
from ..lora.batch import LayerLoRA
from ..lora.expert_tiles import RoutedLoRA, owners_of
from .packed_experts import ExpertProduct, multiply_experts
from .tuned_experts import Mixtures, MixtureShape

# Tokens that one program routes; elements of a row that one program sums.
TOKENS, MIX_BLOCK = 32, 512


class GroupedMoe:
    """A mixture whose experts are computed in grouped launches: those of this process, if others
    have the rest.

    `capability` None asks the device. With `deterministic` a row's bits do not depend on the other
    rows; without, launches may be measured together with those of the other `mixtures`.
    """

    can_be_recorded = True

    def __init__(
        self,
        parts: MixtureParts,
        *,
        deterministic: bool = False,
        capability: tuple[int, int] | None = None,
        mixtures: Mixtures | None = None,
        dependent_launches: DependentLaunches | None = None,
    ) -> None:
        self._dependent_launches = dependent_launches or DependentLaunches()
        self._router, self._shared, self._config = parts.router, parts.shared, parts.config
        self._gelu, self._deterministic = parts.gelu, deterministic
        self._correction, self._local = parts.correction, parts.config.local
        swiglu = parts.config.swiglu
        self._gating: dict[str, float] = {
            "GELU": parts.gelu,
            "ALPHA": 0.0 if swiglu is None else swiglu.alpha,
            "LIMIT": 0.0 if swiglu is None else swiglu.limit,
        }
        self._gate_up, self._down = parts.weights.gate_up, parts.weights.down
        values = self._down.values
        self._capability = capability or _capability(values.device)
        self._stored = _storage(values.dtype, self._capability)
        shared = Mixtures() if mixtures is None or deterministic else mixtures
        self._tuned = shared.add(self._shape(), self)

    @property
    def _is_partial(self) -> bool:
        """Whether other processes have some of the experts."""
        return len(self._local) < self._config.count

    def _shape(self) -> MixtureShape:
        down, config = self._down, self._config
        sizes = (config.count, config.per_token, down.outputs, down.inputs, down.values.dtype)
        elsewhere = config.count - len(self._local)
        if isinstance(down, GroupedPackedWeight):
            return MixtureShape(*sizes, down.group, down.bits, elsewhere)
        return MixtureShape(*sizes, down.own_group, elsewhere=elsewhere)

    def __call__(
        self, x: torch.Tensor, lora: LayerLoRA | None = None, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not len(x):
            return torch.empty_like(x)
        rows = x if x.stride(1) == 1 else x.contiguous()
        return self.run(rows, self._tuned.chosen(len(x)) or self.default(rows), slots, lora)

    def run(
        self,
        rows: torch.Tensor,
        launch: ExpertLaunch,
        slots: torch.Tensor | None = None,
        lora: LayerLoRA | None = None,
    ) -> torch.Tensor:
        """Computes dense rows with the given launch."""
        routing = self.route(rows, launch.up.rows, slots, lora)
        if lora is not None and lora.experts:
            computed = self._adapted(rows, launch, routing, lora)
            return self._mix(rows, computed, routing.weights, slots, lora)
        pairs, weights = routing.order.numel(), routing.weights
        read, per_token = rows, self._config.per_token
        if self._config.scaled_inputs:
            # Each pair has a row of its own.
            read, per_token = _scaled(rows, weights), 1
            weights = (weights != 0).float() if self._is_partial else torch.ones_like(weights)
        active = rows.new_empty(pairs, self._down.inputs)
        self._multiply(active, read, self._gate_up, routing, launch.up, True, per_token)
        computed = rows.new_empty(pairs, self._down.outputs)
        self._multiply(computed, active, self._down, routing, launch.down, False)
        return self._mix(rows, computed, weights, slots, lora)

    def _adapted(
        self, x: torch.Tensor, launch: ExpertLaunch, routing: Routing, lora: LayerLoRA
    ) -> torch.Tensor:
        """Computes [pairs, H], with the adapters' terms before and after the activation."""
        order, tiles, live = routing.order, routing.tiles, routing.live
        routed = RoutedLoRA(
            lora, owners_of(lora), order, tiles, live,
            self._config.per_token, launch.up.rows, self._dependent_launches,
        )  # fmt: skip
        gathered = routed.gathered(x)
        gate_up = x.new_empty(len(gathered), 2 * self._down.inputs)
        self._multiply(gate_up, gathered, self._gate_up, routing, launch.up, False)
        routed.add("gate_up", gathered, gate_up)
        active = routed.activated(gate_up, self._gelu)
        computed = x.new_empty(len(active), self._down.outputs)
        self._multiply(computed, active, self._down, routing, launch.down, False)
        routed.add("down", active, computed)
        return computed

    def route(
        self,
        x: torch.Tensor,
        tile_rows: int,
        slots: torch.Tensor | None = None,
        lora: LayerLoRA | None = None,
    ) -> Routing:
        """Assigns the rows of x [T, H] to experts, in tiles of `tile_rows` rows. No expert computes
        padding: its weights, and `order` after the last tile, stay as they are."""
        logits = self._router(x)
        if lora is not None:
            lora.add("router", x, logits)
        config, tokens = self._config, len(x)
        pairs, programs = tokens * config.per_token, -(-tokens // TOKENS)
        routing = Routing(
            weights=x.new_empty(tokens, config.per_token, dtype=torch.float32),
            order=x.new_empty(pairs, dtype=torch.int32),
            tiles=x.new_empty(3, most_tiles(pairs, len(self._local), tile_rows), dtype=torch.int32),
            live=x.new_empty(1, dtype=torch.int32),
        )
        alone = programs == 1
        choices = None if alone else x.new_empty(tokens, config.count, dtype=torch.uint8)
        counts = None if alone else x.new_empty(programs, config.count, dtype=torch.int32)
        layout = (routing.order, routing.tiles, routing.live)
        capacity, block = routing.tiles.shape[1], power_of_two(config.count)
        sizes = {
            "EXPERTS": config.count, "PER_TOKEN": config.per_token, "TOKENS": TOKENS,
            "FIRST": self._local.start,
            "BLOCK": block, "ROWS": tile_rows, "num_warps": min(16, max(4, block // 16)),
            **self._dependent_launches.small,
        }  # fmt: skip
        route_kernel[(programs,)](
            routing.weights, choices, counts, *layout, logits, slots,
            self._correction, tokens, capacity,
            RENORMALISE=config.renormalise, SIGMOID=config.sigmoid,
            CORRECTED=self._correction is not None, GROUPS=config.groups,
            KEPT_GROUPS=config.kept_groups, GROUP_BEST=config.group_best, FACTOR=config.factor,
            PADDED=slots is not None, LOCAL=len(self._local), ALONE=alone, **sizes,
        )  # fmt: skip
        if not alone:
            place_kernel[(programs,)](*layout, choices, counts, tokens, programs, capacity, **sizes)
        return routing

    def default(self, x: torch.Tensor) -> ExpertLaunch:
        """The table's launch for this number of rows."""
        average = len(x) * self._config.per_token / self._config.count
        wanted = None if self._deterministic else average
        tile = expert_launch(self._capability[0], x.element_size(), wanted)
        if isinstance(self._down, GroupedPackedWeight):
            tile = packed_tile(x.element_size(), tile.rows)
        return ExpertLaunch(tile, tile)

    def candidates(self, x: torch.Tensor) -> list[ExpertLaunch]:
        """Launches that may be faster for this number of rows; the first is the table's."""
        first = self.default(x)
        if isinstance(self._down, GroupedPackedWeight):
            return packed_tiles(first, x.element_size())
        return expert_candidates(first, self._capability[0], x.element_size())

    def _multiply(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        weight: GroupedWeight | GroupedPackedWeight,
        routing: Routing,
        launch: LinearLaunch,
        gated: bool,
        per_token: int | None = None,
    ) -> None:
        """`per_token` successive pairs (None: those of a token) share a row of x, if `gated`."""
        per_token = per_token or self._config.per_token
        if isinstance(weight, GroupedPackedWeight):
            product = ExpertProduct(weight, per_token, gated, self._gating)
            return multiply_experts(
                output, x, product, routing, launch, self._dependent_launches.product
            )
        (values,) = self._stored.views([weight.values])
        scales, outputs = weight.scales, output.shape[1]
        groups, group = 0 if scales is None else scales.shape[2], weight.own_group
        columns = _columns(launch, gated, group > 0)
        capacity = routing.tiles.shape[1]
        grouped_kernel[(capacity * -(-outputs // columns),)](
            output, x, values, scales, weight.bias, routing.order, routing.tiles, routing.live,
            x.stride(0), capacity,
            PER_TOKEN=per_token, INPUTS=x.shape[1], OUTPUTS=outputs,
            GATED=gated, **self._gating, BIAS=weight.bias is not None,
            SCALES=groups, GROUP=group, BITS=self._stored.as_bytes, ROWS=launch.rows,
            COLUMNS=columns,
            DEPTH=min(GROUP_MULTIPLE, launch.depth) if group else launch.depth,
            TOGETHER=EXPERT_TILES,
            EXACT=dot_precision(x.element_size()), **self._dependent_launches.product,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip

    def _mix(
        self,
        x: torch.Tensor,
        computed: torch.Tensor,
        weights: torch.Tensor,
        slots: torch.Tensor | None,
        lora: LayerLoRA | None = None,
    ) -> torch.Tensor:
        shared, output = self._shared, torch.empty_like(x, memory_format=torch.contiguous_format)
        common = None if shared is None else shared.inner(x, lora)
        gate = None if shared is None else shared.opening(x, lora)
        width = x.shape[1]
        block = min(MIX_BLOCK, power_of_two(width))
        mix_kernel[(len(x), -(-width // block))](
            output, computed, weights, common, gate, slots,
            WIDTH=width, PER_TOKEN=self._config.per_token, SHARED=shared is not None,
            OPENED=gate is not None, PADDED=slots is not None, PARTIAL=self._is_partial,
            BLOCK=block,
            **self._dependent_launches.small, num_warps=4,
        )  # fmt: skip
        return output


def _scaled(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows [T, H] times each of their weights [T, K]: [T * K, H]."""
    return (rows[:, None] * weights[..., None].to(rows.dtype)).flatten(0, 1)


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """The largest number of tiles of `rows` rows that pairs need, for any distribution over
    experts."""
    return (pairs + min(pairs, experts) * (rows - 1)) // rows


def _columns(launch: LinearLaunch, gated: bool, scaled: bool) -> int:
    """Outputs of a tile that fit the registers: gate and up are two, and sums with separate scales
    need as many registers again."""
    columns = launch.columns // 2 if gated else launch.columns
    return columns // 2 if scaled and launch.rows > EXPERT_ROWS[0] else columns


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else AMPERE


def _storage(dtype: torch.dtype, capability: tuple[int, int]) -> Storage:
    return storage(dtype, capability) if is_fp8(dtype) else NOT_FP8
