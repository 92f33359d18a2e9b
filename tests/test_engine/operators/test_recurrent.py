"""Native recurrences beside those in torch, for every instruction set that this CPU runs: ragged
batches, states in scattered blocks, snapshots; chunks give the same bits as the whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from headrace_engine.core.recurrent_state import StateTensor
from headrace_engine.kernels.cpu import library
from headrace_engine.operators.base import TorchOps
from headrace_engine.operators.cpu import NativeOps
from headrace_engine.operators.recurrent import (
    Convolution,
    DeltaShape,
    DeltaWeights,
    Mamba2Shape,
    Mamba2Weights,
    MambaWeights,
    Recurrences,
    conv_state,
    recurrences_of,
)
from headrace_engine.operators.state_memory import StateMemory
from headrace_testing.cpu_levels import chosen_sets
from headrace_testing.recurrent_scenes import (
    LAYER,
    RAGGED,
    Run,
    chunked,
    copied,
    make_memory,
    random,
    written,
)

# Of float32, and of outputs rounded to bfloat16.
EXACT, ROUNDED = 2e-5, 5e-3
# Of the length of the difference to all outputs, where bfloat16 is rounded in between.
ROUNDED_BEFORE = 1e-2
DECODES = tuple(Run(1) for _ in range(5))
TORCH = recurrences_of(TorchOps())

Part = Callable[[list[torch.Tensor], StateMemory], torch.Tensor]


@dataclass(frozen=True)
class Scene:
    """A recurrent part with random weights. `make` gives its computation by some recurrences, of
    rows with `widths` elements. With `rounds` it stores more than outputs in the rows' dtype."""

    make: Callable[[Recurrences], Part]
    widths: tuple[tuple[int, ...], ...]
    tensors: tuple[StateTensor, ...]
    rounds: bool = False

    def rows(self, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [
            random(tokens, *width, seed=10 + seed, dtype=dtype)
            for seed, width in enumerate(self.widths)
        ]


def convolution(channels: int, size: int, dtype: torch.dtype, *, bias: bool = False) -> Convolution:
    weight = random(channels, size, seed=1, dtype=dtype)
    return Convolution(weight, random(channels, seed=2, dtype=dtype) if bias else None)


def gated_delta(shape: DeltaShape, dtype: torch.dtype, size: int = 4, **options: Any) -> Scene:
    weights = DeltaWeights(
        convolution=convolution(shape.channels, size, dtype, **options),
        a_log=random(shape.value_heads, seed=3),
        dt_bias=random(shape.value_heads, seed=4),
        norm=random(shape.value_dim, seed=5, dtype=dtype),
        eps=1e-6,
        shape=shape,
    )

    def make(recurrences: Recurrences) -> Part:
        part = recurrences.gated_delta(weights)
        return lambda rows, memory: part(rows[0], rows[1], rows[2], rows[3], LAYER, memory)

    heads = (shape.value_heads,)
    widths = ((shape.channels,), (*heads, shape.value_dim), heads, heads)
    window = StateTensor((shape.channels, size - 1), dtype)
    return Scene(make, widths, (window, shape.state))


def state_space(
    shape: Mamba2Shape, dtype: torch.dtype, *, normed: bool = True, norm_first: bool = False
) -> Scene:
    norm = random(shape.width, seed=6, dtype=dtype)
    weights = Mamba2Weights(
        convolution=convolution(shape.channels, shape.window, dtype, bias=normed),
        a_log=random(shape.heads, seed=3),
        dt_bias=random(shape.heads, seed=4),
        skip=random(shape.heads, seed=5),
        norm=norm if normed else None,
        eps=1e-5,
        shape=shape,
        norm_first=norm_first,
    )

    def make(recurrences: Recurrences) -> Part:
        part = recurrences.state_space(weights)
        return lambda rows, memory: part(rows[0], rows[1], rows[2], LAYER, memory)

    widths = ((shape.channels,), (shape.width,), (shape.heads,))
    return Scene(make, widths, shape.states(dtype))


def selective_scan(channels: int, state_size: int, dtype: torch.dtype, size: int = 4) -> Scene:
    weights = MambaWeights(
        convolution=convolution(channels, size, dtype, bias=True),
        a_log=random(channels, state_size, seed=3),
        skip=random(channels, seed=4),
    )
    mixing = random(channels, channels + 2 * state_size, seed=5) / channels**0.5

    def select(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # One row after the other, so that a row's bits do not depend on the others.
        selected = torch.stack([row.float() @ mixing for row in values]).to(values.dtype)
        widths = [channels, state_size, state_size]
        steps, b, c = torch.split(selected, widths, dim=-1)
        return steps, b, c

    def make(recurrences: Recurrences) -> Part:
        part = recurrences.selective_scan(weights)
        return lambda rows, memory: part(rows[0], rows[1], select, LAYER, memory)

    matrix = StateTensor((channels, state_size), torch.float32)
    tensors = (conv_state(channels, size, dtype), matrix)
    return Scene(make, ((channels,), (channels,)), tensors, rounds=True)


def short_convolution(channels: int, size: int, dtype: torch.dtype, **options: Any) -> Scene:
    weights = convolution(channels, size, dtype, **options)

    def make(recurrences: Recurrences) -> Part:
        part = recurrences.short_convolution(weights)
        return lambda rows, memory: part(rows[0], rows[1], rows[2], LAYER, memory)

    return Scene(make, ((channels,),) * 3, (conv_state(channels, size, dtype),), rounds=True)


SCENES: dict[str, Callable[[torch.dtype], Scene]] = {
    "gated delta": lambda dtype: gated_delta(DeltaShape(2, 4, 16, 8), dtype),
    "gated delta, uneven": lambda dtype: gated_delta(
        DeltaShape(3, 3, 24, 100), dtype, size=3, bias=True
    ),
    "gated delta, large": lambda dtype: gated_delta(DeltaShape(1, 2, 128, 128), dtype, size=6),
    "state space": lambda dtype: state_space(Mamba2Shape(8, 12, 2, 16, 4), dtype),
    "state space, uneven": lambda dtype: state_space(
        Mamba2Shape(3, 25, 3, 21, 3), dtype, norm_first=True
    ),
    "state space, large": lambda dtype: state_space(
        Mamba2Shape(2, 64, 1, 128, 4), dtype, normed=False
    ),
    "selective scan": lambda dtype: selective_scan(96, 16, dtype),
    "selective scan, uneven": lambda dtype: selective_scan(77, 10, dtype, size=3),
    "short convolution": lambda dtype: short_convolution(64, 3, dtype),
    "short convolution, uneven": lambda dtype: short_convolution(75, 2, dtype, bias=True),
}


# `make test-cpus` runs those between the best and the oldest.
@pytest.fixture(params=dict.fromkeys((chosen_sets()[0], chosen_sets()[-1])))
def native(request: pytest.FixtureRequest) -> Iterator[Recurrences]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield NativeOps(library.load(request.param)).recurrences
    torch.set_num_threads(before)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found = request.param
    assert isinstance(found, torch.dtype)
    return found


@pytest.fixture(params=SCENES)
def scene(request: pytest.FixtureRequest, dtype: torch.dtype) -> Scene:
    return SCENES[request.param](dtype)


@pytest.mark.parametrize("pages", [(256,), (112, 80)], ids=["one tensor", "two tensors"])
@pytest.mark.parametrize("runs", [DECODES, RAGGED], ids=["decodes", "ragged"])
def test_outputs_and_states_are_those_of_torch(
    native: Recurrences,
    scene: Scene,
    dtype: torch.dtype,
    runs: tuple[Run, ...],
    pages: tuple[int, ...],
) -> None:
    rows = scene.rows(sum(run.tokens for run in runs), dtype)
    expected, found = (make_memory(scene.tensors, runs, pages) for _ in range(2))
    wanted = scene.make(TORCH)([row.float() for row in rows], expected)
    outputs = scene.make(native)(rows, found)
    assert outputs.dtype is dtype
    close = nearly if scene.rounds and dtype is torch.bfloat16 else exactly
    close(outputs.float(), wanted, EXACT if dtype is torch.float32 else ROUNDED)
    for one, other in zip(written(found), written(expected), strict=True):
        close(one.float(), other.float(), EXACT)


def exactly(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    torch.testing.assert_close(found, wanted, atol=bound, rtol=bound)


def nearly(found: torch.Tensor, wanted: torch.Tensor, _: float) -> None:
    assert (found - wanted).norm() < ROUNDED_BEFORE * wanted.norm()


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunks_give_the_same_bits(
    native: Recurrences, scene: Scene, dtype: torch.dtype, chunk: int
) -> None:
    runs = [replace(run, snapshots=()) for run in RAGGED]
    rows = scene.rows(sum(run.tokens for run in runs), dtype)
    whole = make_memory(scene.tensors, runs, (256,))
    parts, part = copied(whole), scene.make(native)
    expected = part(rows, whole)
    for step, tokens in chunked(parts, runs, chunk):
        found = part([row[tokens] for row in rows], step)
        assert torch.equal(found, expected[tokens])
    for one, other in zip(written(parts), written(whole), strict=True):
        assert torch.equal(one, other)


def test_other_layers_and_sequences_keep_their_states(native: Recurrences) -> None:
    scene = SCENES["gated delta"](torch.float32)
    memory = make_memory(scene.tensors, RAGGED, (256,))
    before, batch = copied(memory), memory.batch
    scene.make(native)(scene.rows(sum(run.tokens for run in RAGGED), torch.float32), memory)
    allowed = torch.zeros(len(memory.caches[0][0]), dtype=torch.bool)
    allowed[batch.targets[:, memory.layout.part(LAYER)].flatten()] = True
    place = memory.layout.place(LAYER)
    for at, (one, other) in enumerate(zip(memory.caches, before.caches, strict=True)):
        changed = (one[0] != other[0]).any(1)
        assert not (changed & ~allowed).any() if at == place else not changed.any()


def test_rows_that_are_views_are_computed(native: Recurrences) -> None:
    scene = SCENES["gated delta"](torch.float32)
    rows = scene.rows(5, torch.float32)
    padded = [torch.cat([row, row], dim=-1)[..., : row.shape[-1]] for row in rows]
    both = [make_memory(scene.tensors, DECODES, (256,)) for _ in range(2)]
    part = scene.make(native)
    assert torch.equal(part(padded, both[0]), part(rows, both[1]))
