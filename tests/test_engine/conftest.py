"""Fixtures of the engine's tests: the arithmetic of Triton's interpreter, and checkpoints that are
made once for each session."""

import os
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xdist

if TYPE_CHECKING:
    from headrace_testing.adapter_scenes import AdapterScene
    from headrace_testing.checkpoints import Reference

CheckpointMaker = Callable[[str], Path]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Selects Triton's interpreter if there is no CUDA device. Triton reads this when it is first
    imported, which test files do after this.

    The process that only distributes tests to others does not import torch, which takes seconds.
    """
    if not xdist.is_xdist_controller(session):
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def gpu_arithmetic() -> Iterator[None]:
    """Kernels in Triton's interpreter give the same bits on every CPU, and start sooner."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("triton"):  # which torch supports on Linux only
            from headrace_testing.triton_interpreter import correct_arithmetic, save_work

            correct_arithmetic(patch)
            save_work(patch)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointMaker:
    """The folder of a tiny float32 checkpoint of a shape, by name."""
    from headrace_testing.checkpoints import save_checkpoint

    @cache
    def make(name: str) -> Path:
        return save_checkpoint(tmp_path_factory.mktemp(name), name)

    return make


@pytest.fixture(scope="session")
def reference(checkpoint: CheckpointMaker) -> "Callable[[str], Reference]":
    """transformers on the same checkpoint, by name."""
    from headrace_testing.checkpoints import Reference

    @cache
    def make(name: str) -> Reference:
        return Reference(checkpoint(name))

    return make


@pytest.fixture(scope="session")
def adapter_scene(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: CheckpointMaker
) -> "AdapterScene":
    from headrace_testing.adapter_scenes import ADAPTERS, AdapterScene

    return AdapterScene(tmp_path_factory.mktemp("adapters"), checkpoint("qwen3"), ADAPTERS)
