"""Each fault strikes three crowds of clients: everyone gets exactly the undisturbed answer."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace_testing.chaos.command import Worlds, repeat
from headrace_testing.chaos.faults import FAULTS
from headrace_testing.chaos.scene import Fault

IN_CI = [fault for fault in FAULTS.values() if not fault.slow]


@pytest.mark.timeout(600)  # the first one waits for processes of all, on any machine
@pytest.mark.parametrize("fault", IN_CI, ids=[fault.name for fault in IN_CI])
def test_clients_get_their_answers(fault: Fault, worlds_by_seed: dict[int, Worlds]) -> None:
    with ThreadPoolExecutor(len(worlds_by_seed)) as threads:
        running = {
            seed: threads.submit(worlds.run, fault, seed) for seed, worlds in worlds_by_seed.items()
        }
    failed = {seed: mistakes for seed, run in running.items() if (mistakes := run.result())}
    told = ["\n  ".join([repeat(fault.name, seed), *failed[seed]]) for seed in failed]
    assert failed == {}, "\n".join(["", *told])
