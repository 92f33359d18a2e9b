"""A world for each seed: the seeds of a fault run in parallel, since a fault mostly waits.

Worlds for later faults are made while the first ones run. Worlds end with the test file: a dozen
idle gateways and engines take a fifth of a core.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from headrace_testing.chaos.cases import Workload
from headrace_testing.chaos.command import FAULTY_PROCESSES, Worlds, drawn_shards, worlds
from headrace_testing.chaos.scene import Fault
from headrace_testing.forked import Forge
from headrace_testing.sealed_suite import suite as sealing

USUAL_SEEDS = (3,)  # its queue has three shards


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, help="run each fault with the seeds 1 to SEEDS")


@pytest.fixture(scope="session", autouse=True)
def sealed_suite(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Seals the data of all tests if HEADRACE_TEST_SEALED=1, and searches Redis for it."""
    yield from sealing(request, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    from headrace_testing.chaos.workload import make_workload  # imports torch

    return make_workload(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def worlds_by_seed(
    workload: Workload, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[int, Worlds]]:
    last = request.config.getoption("--seeds", None)
    seeds = USUAL_SEEDS if last is None else range(1, last + 1)
    forge = Forge(FAULTY_PROCESSES)
    with ExitStack() as stack:
        made = {
            seed: stack.enter_context(
                worlds(workload, tmp_path_factory.mktemp(f"seed-{seed}"), forge.start)
            )
            for seed in seeds
        }
        _, *later = _kinds(request.session.items)
        for seed, each in made.items():
            each.prepare((kind, drawn_shards(seed)) for kind in later)
        yield made


def _kinds(items: Sequence[pytest.Item]) -> list[str]:
    """The kinds of Redis that the faults to run need, in the order of the faults."""
    functions = [item for item in items if isinstance(item, pytest.Function)]
    calls = [item.callspec.params for item in functions if hasattr(item, "callspec")]
    faults = [call.get("fault") for call in calls]
    return list(dict.fromkeys(fault.servers for fault in faults if isinstance(fault, Fault)))
