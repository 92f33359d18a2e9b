"""Checkpoints that several test files share, made once a session."""

import os
from collections.abc import Callable
from functools import cache
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
