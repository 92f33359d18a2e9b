"""Measures recurrent layers on a GPU: prompts, and decodes, which read and write states once."""

import itertools

import torch

from headrace_engine.core.recurrent_state import StateBatch, StateLayout, StateRun
from headrace_engine.kernels.triton.dependent_launch import DependentLaunches
from headrace_engine.operators.recurrent import (
    Convolution,
    DeltaShape,
    DeltaWeights,
    GatedDelta,
    conv_state,
)
from headrace_engine.operators.state_memory import StateMemory
from headrace_engine.operators.triton_recurrent import TritonRecurrences

from .engine import best_seconds
from .task import Report, Task

# The shapes of Qwen3-Next, and of Kimi Linear, in which each key channel has its own decay.
QWEN, KIMI = DeltaShape(16, 32, 128, 128), DeltaShape(32, 32, 128, 128)
WINDOW, BLOCK_BYTES = 4, 1 << 15
CALLS = 8


def measure_recurrent(task: Task, report: Report) -> None:
    device = torch.device("cuda")
    for name, shape in (("gated delta", QWEN), ("delta by channel", KIMI)):
        part = _layer(shape, device)
        for batch in (1, 64, 256):
            seconds = _seconds(part, shape, (1,) * batch, device, task.sizes.rounds)
            moved = 2 * batch * shape.state.num_bytes
            report(
                f"{name}, {batch} decodes",
                value=seconds * 1e6,
                unit="us",
                gigabytes_per_second=moved / seconds / 1e9,
            )
        for runs in ((4096,), (1024,) * 8):
            seconds = _seconds(part, shape, runs, device, task.sizes.rounds)
            report(f"{name}, {len(runs)} prompts of {runs[0]}", value=seconds * 1e6, unit="us")


def _layer(shape: DeltaShape, device: torch.device) -> GatedDelta:
    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device)

    channels = (shape.key_dim,) if shape is KIMI else ()
    weights = DeltaWeights(
        convolution=Convolution(random(shape.channels, WINDOW).bfloat16(), None),
        a_log=random(shape.value_heads),
        dt_bias=random(shape.value_heads, *channels),
        norm=random(shape.value_dim).bfloat16(),
        eps=1e-6,
        shape=shape,
    )
    return TritonRecurrences(DependentLaunches()).gated_delta(weights)


def _seconds(
    part: GatedDelta, shape: DeltaShape, runs: tuple[int, ...], device: torch.device, rounds: int
) -> float:
    """Seconds of one call, as the mean of several."""
    tensors = (conv_state(shape.channels, WINDOW, torch.bfloat16), shape.state)
    layout = StateLayout(tensors, 1, 1, BLOCK_BYTES)
    blocks = torch.randperm(len(runs) * layout.blocks, device=device).view(len(runs), -1)
    starts = list(itertools.accumulate(runs, initial=0))
    advanced = tuple(
        StateRun(row, begin, end, (row,))
        for row, (begin, end) in enumerate(itertools.pairwise(starts))
    )
    fresh = torch.zeros(len(runs), dtype=torch.bool, device=device)
    cache = torch.zeros(blocks.numel(), BLOCK_BYTES, dtype=torch.uint8, device=device)
    memory = StateMemory(layout, ((cache,),), StateBatch(blocks, fresh, blocks, advanced))

    def rows(*sizes: int) -> torch.Tensor:
        return torch.randn(starts[-1], *sizes, device=device).bfloat16()

    heads = shape.value_heads
    decay = rows(heads * shape.key_dim if shape is KIMI else heads)
    inputs = (rows(shape.channels), rows(heads, shape.value_dim), rows(heads), decay)

    def calls() -> None:
        for _ in range(CALLS):
            part(*inputs, 0, memory)

    return best_seconds(calls, device, rounds) / CALLS
