"""Steps of recurrent layers on tensors without memory."""

import itertools
from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import torch

from headrace_engine.core.recurrent_state import StateBatch, StateLayout, StateRun, StateTensor
from headrace_engine.device.transfer import Array, Transfer
from headrace_engine.kernels.triton.dependent_launch import DependentLaunches
from headrace_engine.models.hybrid.mamba import MambaShape
from headrace_engine.operators import triton_recurrent
from headrace_engine.operators.recurrent import (
    Convolution,
    DeltaShape,
    DeltaWeights,
    Mamba2Shape,
    Mamba2Weights,
    MambaWeights,
    conv_state,
)
from headrace_engine.operators.state_memory import StateMemory

from .meta import META, made

RecurrentShape = DeltaShape | Mamba2Shape | MambaShape
# Positions of a convolution, and elements of a KV block in each tensor of a cache.
SIZE, BLOCK = 4, 16 * 2 * 256


def advance(
    shape: RecurrentShape,
    dtype: torch.dtype,
    runs: tuple[int, ...],
    dependent_launches: DependentLaunches | None = None,
) -> None:
    """Advances states by runs of so many tokens."""
    launches = dependent_launches or DependentLaunches()
    recurrences = triton_recurrent.TritonRecurrences(launches)
    with patch.object(Transfer, "__call__", _moved):
        if isinstance(shape, DeltaShape):
            _advance_delta(recurrences, shape, dtype, runs)
        elif isinstance(shape, Mamba2Shape):
            _advance_space(recurrences, shape, dtype, runs)
        else:
            _advance_scan(recurrences, shape, dtype, runs)


def _advance_delta(
    recurrences: triton_recurrent.TritonRecurrences,
    shape: DeltaShape,
    dtype: torch.dtype,
    runs: tuple[int, ...],
) -> None:
    row, heads = partial(made, sum(runs), dtype=dtype), shape.value_heads
    weights = DeltaWeights(
        convolution=Convolution(made(shape.channels, SIZE, dtype=dtype), None),
        a_log=made(heads),
        dt_bias=made(heads),
        norm=made(shape.value_dim, dtype=dtype),
        eps=1e-6,
        shape=shape,
    )
    memory = _memory((conv_state(shape.channels, SIZE, dtype), shape.state), dtype, runs)
    gate, beta = row(heads, shape.value_dim), row(heads)
    recurrences.gated_delta(weights)(row(shape.channels), gate, beta, beta, 0, memory)


def _advance_space(
    recurrences: triton_recurrent.TritonRecurrences,
    shape: Mamba2Shape,
    dtype: torch.dtype,
    runs: tuple[int, ...],
) -> None:
    row, vector = partial(made, sum(runs), dtype=dtype), made(shape.heads)
    weights = Mamba2Weights(
        convolution=Convolution(
            made(shape.channels, SIZE, dtype=dtype), made(shape.channels, dtype=dtype)
        ),
        a_log=vector,
        dt_bias=vector,
        skip=vector,
        norm=made(shape.width, dtype=dtype),
        eps=1e-6,
        shape=shape,
    )
    rows = (row(shape.channels), row(shape.width), row(shape.heads))
    recurrences.state_space(weights)(*rows, 0, _memory(shape.states(dtype), dtype, runs))


def _advance_scan(
    recurrences: triton_recurrent.TritonRecurrences,
    shape: MambaShape,
    dtype: torch.dtype,
    runs: tuple[int, ...],
) -> None:
    width, size, row = shape.width, shape.state_size, partial(made, sum(runs), dtype=dtype)
    weights = MambaWeights(
        convolution=Convolution(made(width, SIZE, dtype=dtype), made(width, dtype=dtype)),
        a_log=made(width, size),
        skip=made(width),
    )

    def select(_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return row(width), row(size), row(size)

    memory = _memory(shape.states(dtype), dtype, runs)
    recurrences.selective_scan(weights)(row(width), row(width), select, 0, memory)


def _moved(_: object, arrays: Sequence[Array]) -> list[torch.Tensor]:
    return [torch.from_numpy(array).to(META) for array in arrays]


def _memory(
    tensors: tuple[StateTensor, ...], dtype: torch.dtype, runs: tuple[int, ...]
) -> StateMemory:
    layout = StateLayout(tensors, 1, 1, 2 * BLOCK * dtype.itemsize)
    blocks = made(len(runs), layout.blocks, dtype=torch.int64)
    starts = itertools.pairwise(itertools.accumulate(runs, initial=0))
    advanced = tuple(StateRun(one, *ends, (one,)) for one, ends in enumerate(starts))
    fresh = made(len(runs), dtype=torch.bool)
    cache = (made(2, BLOCK, dtype=dtype), made(2, BLOCK, dtype=dtype))
    return StateMemory(layout, (cache,), StateBatch(blocks, fresh, blocks, advanced))
