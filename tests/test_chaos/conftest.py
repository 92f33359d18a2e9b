"""A world for each seed: the seeds of a fault run side by side, since a fault is mostly waiting."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from headrace_testing.chaos.cases import Workload
from headrace_testing.chaos.command import Worlds, worlds
from headrace_testing.chaos.forked import Forge
from headrace_testing.chaos.workload import make_workload

SEEDS = (1, 2, 3)


@pytest.fixture(scope="session")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return make_workload(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="session")
def worlds_by_seed(
    workload: Workload, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Worlds]]:
    forge = Forge()
    with ExitStack() as stack:
        yield {
            seed: stack.enter_context(
                worlds(workload, tmp_path_factory.mktemp(f"seed-{seed}"), forge.start)
            )
            for seed in SEEDS
        }
