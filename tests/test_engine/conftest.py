"""Fixtures of the engine's tests: the arithmetic of Triton's interpreter, and checkpoints that are
made once for each session."""

import os
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from headrace_testing.adapter_scenes import ADAPTERS, AdapterScene
from headrace_testing.checkpoints import Reference, save_checkpoint

if not torch.cuda.is_available():
    # Triton reads this when it is first imported, which test files do after this.
    os.environ.setdefault("TRITON_INTERPRET", "1")

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]


@pytest.fixture(scope="session", autouse=True)
def gpu_arithmetic() -> Iterator[None]:
    """Kernels in Triton's interpreter give the same bits on every CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("triton"):  # which torch supports on Linux only
            from headrace_testing.triton_interpreter import correct_arithmetic

            correct_arithmetic(patch)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointMaker:
    """The folder of a tiny float32 checkpoint of a shape, by name."""

    @cache
    def make(name: str) -> Path:
        return save_checkpoint(tmp_path_factory.mktemp(name), name)

    return make


@pytest.fixture(scope="session")
def reference(checkpoint: CheckpointMaker) -> ReferenceMaker:
    """transformers on the same checkpoint, by name."""

    @cache
    def make(name: str) -> Reference:
        return Reference(checkpoint(name))

    return make


@pytest.fixture(scope="session")
def adapter_scene(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: CheckpointMaker
) -> AdapterScene:
    return AdapterScene(tmp_path_factory.mktemp("adapters"), checkpoint("qwen3"), ADAPTERS)
