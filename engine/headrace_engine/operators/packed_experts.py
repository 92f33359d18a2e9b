"""Products of experts with packed int4 or int8 weights: one Triton launch for a whole mixture."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..kernels.triton.dependent_launch import Options
from ..kernels.triton.launch import EXPERT_TILES, LinearLaunch, dot_precision
from ..kernels.triton.packed_experts import grouped_packed_kernel
from ..layers.packed_weights import GroupedPackedWeight
from ..layers.routing import Routing
from .packed_linear import by_assembly


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """One product of a mixture's experts. If `gated`, the activation of a gated MLP follows;
    `gating` has its constants for the kernels."""

    weight: GroupedPackedWeight
    per_token: int
    gated: bool
    gating: Mapping[str, float]


def multiply_experts(
    output: torch.Tensor,
    x: torch.Tensor,
    product: ExpertProduct,
    routing: Routing,
    launch: LinearLaunch,
    options: Options,
) -> None:
    weight, outputs, capacity = product.weight, output.shape[1], routing.tiles.shape[1]
    grouped_packed_kernel[(capacity * -(-outputs // launch.columns),)](
        output, x, weight.words, weight.scales, weight.zero_points, weight.bias,
        routing.order, routing.tiles, routing.live, x.stride(0), capacity,
        PER_TOKEN=product.per_token, STEPS=weight.words.shape[1], GROUPS=weight.scales.shape[1],
        INPUTS=weight.inputs, OUTPUTS=outputs, GATED=product.gated, **product.gating,
        BIAS=weight.bias is not None,
        BITS=weight.bits, GROUP=weight.group, ZERO=weight.kernel_zero,
        RUN=weight.words.shape[3], ROWS=launch.rows, COLUMNS=launch.columns,
        TOGETHER=EXPERT_TILES, ASM=by_assembly(x), EXACT=dot_precision(x.element_size()),
        num_warps=launch.warps, num_stages=launch.stages, **options,
    )  # fmt: skip
