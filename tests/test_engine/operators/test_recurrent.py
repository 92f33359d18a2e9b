"""Native recurrences against those in torch, for every instruction set that this CPU runs: ragged
batches, states in scattered blocks, snapshots; chunks give the same bits as the whole."""

from dataclasses import replace

import pytest
import torch

from headrace_engine.kernels.cpu import library
from headrace_engine.operators.base import TorchOps
from headrace_engine.operators.cpu import NativeOps
from headrace_engine.operators.recurrent import Recurrences, recurrences_of
from headrace_testing.cpu_levels import chosen_sets
from headrace_testing.recurrent_parts import SCENES, Scene
from headrace_testing.recurrent_scenes import (
    LAYER,
    RAGGED,
    Run,
    chunked,
    copied,
    make_memory,
    written,
)

# The bounds of errors in float32, and of outputs rounded to bfloat16.
EXACT, ROUNDED = 2e-5, 5e-3
# The bound of the difference's norm, relative to that of all outputs, if intermediate results are
# rounded to bfloat16.
ROUNDED_BEFORE = 1e-2
# The others are computed in torch.
NATIVE = [name for name in SCENES if "by channel" not in name]
DECODES = tuple(Run(1) for _ in range(5))
TORCH = recurrences_of(TorchOps())


# `make test-cpus` runs those between the best and the oldest.
@pytest.fixture(params=dict.fromkeys((chosen_sets()[0], chosen_sets()[-1])))
def native(request: pytest.FixtureRequest) -> Recurrences:
    torch.set_num_threads(2)
    return NativeOps(library.load(request.param)).recurrences


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found = request.param
    assert isinstance(found, torch.dtype)
    return found


@pytest.fixture(params=NATIVE)
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
