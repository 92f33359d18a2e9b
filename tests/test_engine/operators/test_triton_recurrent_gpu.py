"""Triton's recurrences on a GPU beside those in torch: prompts of several chunks, in real launches.
Needs a CUDA device: `pytest -m gpu -rs`.
"""

import pytest
import torch

from headrace_engine.cuda_graphs.capture import CudaCapture
from headrace_engine.kernels.triton.dependent_launch import DependentLaunches
from headrace_engine.kernels.triton.launch import TOKEN_BY_TOKEN, RecurrentLaunches
from headrace_engine.operators.triton_recurrent import TritonRecurrences
from headrace_testing.recurrent_parts import SCENES
from headrace_testing.recurrent_scenes import Run, copied, make_memory, written
from headrace_testing.recurrent_triton import DEVICE, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# Some end with their chunk, some within it.
PROMPTS = (Run(3), Run(150, snapshots=(16, 80)), Run(64), Run(33, continues=False))


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("least", [1, TOKEN_BY_TOKEN], ids=["chunks", "tokens"])
def test_prompts_are_those_of_torch(name: str, least: int) -> None:
    launches = RecurrentLaunches(least=(least, least))
    recurrences = TritonRecurrences(DependentLaunches(), launches)
    check(SCENES[name](torch.bfloat16), PROMPTS, (512,), torch.bfloat16, recurrences)


@pytest.mark.parametrize("name", SCENES)
def test_recorded_decodes_give_the_same_bits(name: str) -> None:
    runs, scene = tuple(Run(1) for _ in range(5)), SCENES[name](torch.bfloat16)
    first = copied(make_memory(scene.tensors, runs, (512,)), DEVICE)
    recorded, expected = copied(first), copied(first)
    rows = [torch.zeros_like(row, device=DEVICE) for row in scene.rows(5, torch.bfloat16)]
    part, other = (scene.make(TritonRecurrences(DependentLaunches()), DEVICE) for _ in range(2))
    replay = CudaCapture()(lambda: part(rows, recorded))
    for row, values in zip(rows, scene.rows(5, torch.bfloat16), strict=True):
        row.copy_(values)
    for cache, before in zip(recorded.caches, first.caches, strict=True):
        cache[0].copy_(before[0])
    outputs = replay()
    assert torch.equal(outputs, other(rows, expected))
    for one, wanted in zip(written(recorded), written(expected), strict=True):
        assert torch.equal(one, wanted)
