"""Each fault strikes a crowd of clients for each seed: all get exactly the undisturbed answers."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace_testing.chaos.command import Worlds, drawn_shards, repeat
from headrace_testing.chaos.faults import FAULTS
from headrace_testing.chaos.scene import Fault

EACH = [
    pytest.param(fault, id=fault.name, marks=[pytest.mark.long_fault] if fault.slow else [])
    for fault in FAULTS.values()
]


@pytest.mark.timeout(600)  # the first test starts the processes of all
@pytest.mark.parametrize("fault", EACH)
def test_clients_get_their_answers(fault: Fault, worlds_by_seed: dict[int, Worlds]) -> None:
    shards = {seed: drawn_shards(seed) for seed in worlds_by_seed}
    with ThreadPoolExecutor(1 if fault.crowd > 1 else len(worlds_by_seed)) as threads:
        running = {
            seed: threads.submit(worlds.run, fault, seed, shards[seed])
            for seed, worlds in worlds_by_seed.items()
        }
    failed = {seed: mistakes for seed, run in running.items() if (mistakes := run.result())}
    reports = [
        "\n  ".join([repeat(fault.name, seed, shards[seed]), *failed[seed]]) for seed in failed
    ]
    assert failed == {}, "\n".join(["", *reports])
