"""Products of experts in whole numbers of 4 or 8 bits, all of a mixture in one launch of Triton."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..triton_kernels.dependent import Options
from ..triton_kernels.launch import EXPERT_TILES, LinearLaunch, dot_precision
from ..triton_kernels.levels_experts import grouped_levels_kernel
from .levels_linear import by_assembly
from .packed_levels import GroupedLevels
from .routing import Routing


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """What a product of experts is of; `gated` has the activation of a gated MLP behind it, which
    `gating` tells the kernels."""

    weight: GroupedLevels
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
    grouped_levels_kernel[(capacity * -(-outputs // launch.columns),)](
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
