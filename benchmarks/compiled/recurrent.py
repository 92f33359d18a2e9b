"""Steps of recurrent layers on tensors without memory."""

import itertools
from functools import partial
from unittest.mock import patch

import torch

from headrace_engine.core.recurrent_state import StateBatch, StateLayout, StateRun, StateTensor
from headrace_engine.kernels.triton.dependent_launch import DependentLaunches
from headrace_engine.operators import triton_recurrent
from headrace_engine.operators.recurrent import Convolution, DeltaShape, DeltaWeights, conv_state
from headrace_engine.operators.state_memory import StateMemory

from .meta import META, made

# Elements of a KV block in each tensor of a cache.
BLOCK = 16 * 2 * 256


def advance(
    shape: DeltaShape,
    dtype: torch.dtype,
    runs: tuple[int, ...],
    dependent_launches: DependentLaunches | None = None,
) -> None:
    """Advances states by runs of so many tokens."""
    recurrences = triton_recurrent.TritonRecurrences(dependent_launches or DependentLaunches())
    row = partial(made, sum(runs), dtype=dtype)
    weights = DeltaWeights(
        convolution=Convolution(made(shape.channels, 4, dtype=dtype), None),
        a_log=made(shape.value_heads),
        dt_bias=made(shape.value_heads),
        norm=made(shape.value_dim, dtype=dtype),
        eps=1e-6,
        shape=shape,
    )
    tensors = (conv_state(shape.channels, 4, dtype), shape.state)
    gates = (
        row(shape.value_heads, shape.value_dim),
        row(shape.value_heads),
        row(shape.value_heads),
    )
    with patch.object(triton_recurrent.Transfer, "__call__", _moved):
        recurrences.gated_delta(weights)(
            row(shape.channels), gate, beta, beta, 0, _memory(tensors, dtype, runs)
        )


def _moved(_: object, arrays: list[triton_recurrent.np.ndarray]) -> list[torch.Tensor]:
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
