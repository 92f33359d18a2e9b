"""Checkpoints that several test files share, made once a session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from headrace_testing.checkpoints import Reference, save_checkpoint

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
