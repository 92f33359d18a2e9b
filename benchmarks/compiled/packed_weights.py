"""Records the launches for packed int4 and int8 weights on tensors without memory; see launches."""

from dataclasses import replace

import torch

from headrace_engine.checkpoints.config import ExpertsConfig
from headrace_engine.kernels.triton import packed_launch as table
from headrace_engine.kernels.triton.dependent_launch import DependentLaunches
from headrace_engine.kernels.triton.launch import ROW_BOUNDS
from headrace_engine.layers.expert_weights import ExpertWeights
from headrace_engine.layers.mxfp4_weight import BLOCK
from headrace_engine.layers.packed_weights import GroupedPackedWeight, PackedWeight
from headrace_engine.operators.packed_linear import PackedProducts

from .meta import made

RUN, GROUP = 64, 128


def multiply_packed(
    sizes: tuple[int, int],
    bits: int,
    dtype: torch.dtype,
    dependent_launches: DependentLaunches | None = None,
) -> None:
    """Multiplies by weights [out, in] = `sizes`, with a scale for each 128 inputs or one for all,
    with and without zero points. Row counts: a few, a full tile, and so many that the whole weight
    is dequantised."""
    outputs, inputs = sizes
    for group, symmetric in ((GROUP, True), (GROUP, False), (0, True)):
        packed = _packed(outputs, inputs, bits, group, symmetric)
        for deterministic in (False, True):
            linear = PackedProducts(dependent_launches, deterministic).layer(packed, None)
            for rows in (1, *ROW_BOUNDS[-2:], table.DEQUANTIZED_ROWS + 1):
                linear(made(rows, inputs, dtype=dtype))


def tune_packed(sizes: tuple[int, int], bits: int, dtype: torch.dtype) -> None:
    """Launches the candidates that the autotuner measures for such a weight."""
    outputs, inputs = sizes
    linear = PackedProducts().layer(_packed(outputs, inputs, bits, GROUP, True), None)
    for rows in ROW_BOUNDS:
        x = made(rows, inputs, dtype=dtype)
        for launch in table.packed_candidates(rows, outputs, linear.steps):
            linear.small_batch(x, launch)


def quantized_experts(hidden: int, config: ExpertsConfig, bits: int) -> list[ExpertWeights]:
    """Experts with zero points, and experts without."""
    inner = config.intermediate_size
    return [
        ExpertWeights(
            _grouped(config.count, _packed(2 * inner, hidden, bits, GROUP, symmetric)),
            _grouped(config.count, _packed(hidden, inner, bits, GROUP, symmetric)),
        )
        for symmetric in (True, False)
    ]


def mxfp4_experts(hidden: int, config: ExpertsConfig) -> ExpertWeights:
    """MXFP4 experts whose sizes are multiples of 64 only, as in gpt-oss."""
    inner = config.intermediate_size
    gate_up, down = (
        replace(_packed(outputs, inputs, 4, BLOCK, True, run=16), zero=table.E2M1)
        for outputs, inputs in ((2 * inner, hidden), (hidden, inner))
    )
    return ExpertWeights(_grouped(config.count, gate_up), _grouped(config.count, down))


def _packed(
    outputs: int, inputs: int, bits: int, group: int, symmetric: bool, run: int = RUN
) -> PackedWeight:
    groups = inputs // group if group else 1
    words = made(inputs * bits // 16 // run, outputs, run, dtype=torch.int16)
    scales = made(groups, outputs, dtype=torch.float16)
    zeros = None if symmetric else made(groups, outputs, dtype=torch.uint8)
    return PackedWeight(words, scales, zeros, 1 << (bits - 1), group, bits, None)


def _grouped(count: int, one: PackedWeight) -> GroupedPackedWeight:
    def together(part: torch.Tensor) -> torch.Tensor:
        return made(count, *part.shape, dtype=part.dtype)

    zeros = None if one.zeros is None else together(one.zeros)
    words, scales = together(one.words), together(one.scales)
    return GroupedPackedWeight(words, scales, zeros, one.zero, one.group, one.bits, one.inputs)
