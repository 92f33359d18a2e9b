"""What is launched for weights in whole numbers, on tensors without memory; see launches."""

from dataclasses import replace

import torch

from headrace_engine.model.config import ExpertsConfig
from headrace_engine.model.expert_weights import ExpertWeights
from headrace_engine.model.levels_linear import LevelsProducts
from headrace_engine.model.packed_levels import GroupedLevels, PackedLevels
from headrace_engine.model.quantization.mxfp4_weight import BLOCK
from headrace_engine.triton_kernels import levels_launch as table
from headrace_engine.triton_kernels.dependent import DependentLaunches
from headrace_engine.triton_kernels.launch import ROW_BOUNDS

from .meta import made

RUN, GROUP = 64, 128


def multiply_levels(
    sizes: tuple[int, int],
    bits: int,
    dtype: torch.dtype,
    dependent: DependentLaunches | None = None,
) -> None:
    """By a weight [out, in] = `sizes`, a scale for each 128 inputs and for all, zero points and
    none: for few rows, for as many as a tile has, and by weights that are made whole."""
    outputs, inputs = sizes
    for group, symmetric in ((GROUP, True), (GROUP, False), (0, True)):
        packed = _packed(outputs, inputs, bits, group, symmetric)
        for deterministic in (False, True):
            linear = LevelsProducts(dependent, deterministic).layer(packed, None)
            for rows in (1, *ROW_BOUNDS[-2:], table.WIDENED_ROWS + 1):
                linear(made(rows, inputs, dtype=dtype))


def tune_levels(sizes: tuple[int, int], bits: int, dtype: torch.dtype) -> None:
    """What is measured beside it."""
    outputs, inputs = sizes
    linear = LevelsProducts().layer(_packed(outputs, inputs, bits, GROUP, True), None)
    for rows in ROW_BOUNDS:
        x = made(rows, inputs, dtype=dtype)
        for launch in table.levels_candidates(rows, outputs, linear.steps):
            linear.narrow(x, launch)


def level_experts(hidden: int, config: ExpertsConfig, bits: int) -> list[ExpertWeights]:
    """With zero points and without."""
    inner = config.intermediate_size
    return [
        ExpertWeights(
            _grouped(config.count, _packed(2 * inner, hidden, bits, GROUP, symmetric)),
            _grouped(config.count, _packed(hidden, inner, bits, GROUP, symmetric)),
        )
        for symmetric in (True, False)
    ]


def mxfp4_experts(hidden: int, config: ExpertsConfig) -> ExpertWeights:
    """Of sizes that are multiples of 64 only, as gpt-oss's."""
    inner = config.intermediate_size
    gate_up, down = (
        replace(_packed(outputs, inputs, 4, BLOCK, True, run=16), zero=table.E2M1)
        for outputs, inputs in ((2 * inner, hidden), (hidden, inner))
    )
    return ExpertWeights(_grouped(config.count, gate_up), _grouped(config.count, down))


def _packed(
    outputs: int, inputs: int, bits: int, group: int, symmetric: bool, run: int = RUN
) -> PackedLevels:
    groups = inputs // group if group else 1
    words = made(inputs * bits // 16 // run, outputs, run, dtype=torch.int16)
    scales = made(groups, outputs, dtype=torch.float16)
    zeros = None if symmetric else made(groups, outputs, dtype=torch.uint8)
    return PackedLevels(words, scales, zeros, 1 << (bits - 1), group, bits, None)


def _grouped(count: int, one: PackedLevels) -> GroupedLevels:
    def together(part: torch.Tensor) -> torch.Tensor:
        return made(count, *part.shape, dtype=part.dtype)

    zeros = None if one.zeros is None else together(one.zeros)
    words, scales = together(one.words), together(one.scales)
    return GroupedLevels(words, scales, zeros, one.zero, one.group, one.bits, one.inputs)
