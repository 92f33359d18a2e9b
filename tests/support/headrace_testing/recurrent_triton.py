"""Compares recurrences through Triton with those in torch, on a device if there is one."""

import torch

from headrace_engine.operators.base import TorchOps
from headrace_engine.operators.recurrent import Recurrences, recurrences_of

from .recurrent_parts import Scene
from .recurrent_scenes import Run, copied, make_memory, written

COMPILED = torch.cuda.is_available()
DEVICE = torch.device("cuda" if COMPILED else "cpu")
# Of float32; and of the length of the difference to all outputs of bfloat16.
EXACT, ROUNDED = 1e-4, 1e-2


def check(
    scene: Scene,
    runs: tuple[Run, ...],
    pages: tuple[int, ...],
    dtype: torch.dtype,
    recurrences: Recurrences,
) -> None:
    """Compares outputs and states with those of torch in float32."""
    rows = scene.rows(sum(run.tokens for run in runs), dtype)
    expected = make_memory(scene.tensors, runs, pages)
    found = copied(expected, DEVICE)
    wanted = scene.make(recurrences_of(TorchOps()))([row.float() for row in rows], expected)
    outputs = scene.make(recurrences, DEVICE)([row.to(DEVICE) for row in rows], found)
    assert outputs.dtype is dtype
    _close(outputs.cpu(), wanted, dtype)
    for one, other in zip(written(found), written(expected), strict=True):
        _close(one.cpu(), other, dtype)


def _close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    found, wanted = found.float(), wanted.float()
    if dtype is torch.float32:
        torch.testing.assert_close(found, wanted, atol=EXACT, rtol=EXACT)
    assert (found - wanted).norm() <= ROUNDED * wanted.norm()
