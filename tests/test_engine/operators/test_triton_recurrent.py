"""Triton's recurrences beside those in torch: ragged batches, states in scattered blocks,
snapshots; token by token and in chunks.
"""

import pytest
import torch

from headrace_engine.kernels.triton import launch
from headrace_engine.kernels.triton.dependent_launch import DependentLaunches
from headrace_engine.operators.base import TorchOps
from headrace_engine.operators.recurrent import recurrences_of
from headrace_engine.operators.triton import TritonOps
from headrace_engine.operators.triton_recurrent import TritonRecurrences
from headrace_testing.recurrent_parts import SCENES, Scene
from headrace_testing.recurrent_scenes import RAGGED, Run, copied, make_memory, written

COMPILED = torch.cuda.is_available()
DEVICE = torch.device("cuda" if COMPILED else "cpu")
# Of float32; and of the length of the difference to all outputs of bfloat16.
EXACT, ROUNDED = 1e-4, 1e-2
DECODES = tuple(Run(1) for _ in range(5))
PROMPTS = (Run(3), Run(150, snapshots=(16, 80)), Run(64), Run(33, continues=False))
TORCH = recurrences_of(TorchOps())
ALWAYS, NEVER = 1, 1 << 30
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=[name for name in SCENES if COMPILED or "large" not in name])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: a prompt of a few tokens has several chunks."""
    if not COMPILED:
        small = launch.RecurrentLaunch(8, 16, 1, 1)
        monkeypatch.setattr(launch, "RECURRENT", {True: small, False: small})


def check(
    scene: Scene,
    runs: tuple[Run, ...],
    pages: tuple[int, ...],
    dtype: torch.dtype,
    recurrences: TritonRecurrences,
) -> None:
    """Compares outputs and states with those of torch in float32."""
    rows = scene.rows(sum(run.tokens for run in runs), dtype)
    expected = make_memory(scene.tensors, runs, pages)
    found = copied(expected, DEVICE)
    wanted = scene.make(TORCH)([row.float() for row in rows], expected)
    outputs = scene.make(recurrences, DEVICE)([row.to(DEVICE) for row in rows], found)
    assert outputs.dtype is dtype
    close(outputs.cpu(), wanted, dtype)
    for one, other in zip(written(found), written(expected), strict=True):
        close(one.cpu(), other, dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    found, wanted = found.float(), wanted.float()
    if dtype is torch.float32:
        torch.testing.assert_close(found, wanted, atol=EXACT, rtol=EXACT)
    assert (found - wanted).norm() <= ROUNDED * wanted.norm()


@DTYPES
@pytest.mark.parametrize("pages", [(512,), (112, 80)], ids=["one tensor", "two tensors"])
def test_outputs_and_states_are_those_of_torch(
    name: str, pages: tuple[int, ...], dtype: torch.dtype
) -> None:
    check(SCENES[name](dtype), RAGGED, pages, dtype, TritonOps().recurrences)


def test_decodes_are_those_of_torch(name: str) -> None:
    check(SCENES[name](torch.float32), DECODES, (512,), torch.float32, TritonOps().recurrences)


@pytest.mark.skipif(not COMPILED, reason="takes the interpreter too long")
@DTYPES
@pytest.mark.parametrize("limit", [ALWAYS, NEVER], ids=["chunks", "tokens"])
def test_prompts_in_chunks_and_token_by_token(name: str, limit: int, dtype: torch.dtype) -> None:
    recurrences = TritonRecurrences(DependentLaunches(), limit)
    check(SCENES[name](dtype), PROMPTS, (512,), dtype, recurrences)
