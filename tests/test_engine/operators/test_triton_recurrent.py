"""Triton's recurrences beside those in torch: ragged batches, states in scattered blocks,
snapshots; token by token and in chunks.
"""

from dataclasses import replace

import pytest
import torch

from headrace_engine.kernels.triton.dependent_launch import DependentLaunches
from headrace_engine.kernels.triton.launch import RecurrentLaunch, RecurrentLaunches
from headrace_engine.operators.triton import TritonOps
from headrace_engine.operators.triton_recurrent import TritonRecurrences
from headrace_testing.recurrent_parts import SCENES
from headrace_testing.recurrent_scenes import RAGGED, Run, copied, make_memory
from headrace_testing.recurrent_triton import COMPILED, DEVICE, check

DECODES = tuple(Run(1) for _ in range(5))
# The interpreter is slow: a prompt of a few tokens has several chunks, the widest state of a delta
# net two programs, and each scene every dtype and every number of tensors once.
CHUNK = RecurrentLaunch(16 if COMPILED else 8, 16, 1, 1)
CHUNKS = RecurrentLaunches(CHUNK if COMPILED else replace(CHUNK, columns=64), CHUNK, least=(5, 5))
NAMES = [name for name in SCENES if COMPILED or "large" not in name]
DTYPES = (torch.float32, torch.bfloat16)
PAGES = {"one tensor": (512,), "two tensors": (112, 80)}

each_scene = pytest.mark.parametrize("name", NAMES)
VARIANTS = [
    pytest.param(name, pages, dtype, id=f"{name}-{tensors}-{dtype}")
    for at, name in enumerate(NAMES)
    for kind, (tensors, pages) in enumerate(PAGES.items(), at)
    for count, dtype in enumerate(DTYPES, kind)
    if COMPILED or count % 2 == 0
]


@pytest.mark.parametrize(("name", "pages", "dtype"), VARIANTS)
def test_outputs_and_states_are_those_of_torch(
    name: str, pages: tuple[int, ...], dtype: torch.dtype
) -> None:
    recurrences = TritonRecurrences(DependentLaunches(), CHUNKS)
    check(SCENES[name](dtype), RAGGED, pages, dtype, recurrences)


@each_scene
def test_tokens_are_advanced_one_by_one(name: str) -> None:
    check(SCENES[name](torch.float32), RAGGED, (512,), torch.float32, TritonOps().recurrences)


@each_scene
def test_decodes_are_those_of_torch(name: str) -> None:
    check(SCENES[name](torch.float32), DECODES, (512,), torch.float32, TritonOps().recurrences)


@each_scene
def test_states_without_a_target_are_not_written(name: str) -> None:
    """As in a recorded step, whose batch always has the same runs."""
    scene = SCENES[name](torch.float32)
    memory = copied(make_memory(scene.tensors, DECODES, (512,)), DEVICE)
    before = copied(memory)
    memory.batch.targets.fill_(-1)
    rows = [row.to(DEVICE) for row in scene.rows(len(DECODES), torch.float32)]
    scene.make(TritonOps().recurrences, DEVICE)(rows, memory)
    for cache, other in zip(memory.caches, before.caches, strict=True):
        assert torch.equal(cache[0], other[0])
