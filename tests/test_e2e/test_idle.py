"""Idle processes cost nothing: they wait on sockets and only wake up for their beats."""

import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from headrace_testing.headrace_up import MODEL, UpProcess

IDLE_S = 4.0
MAX_CPU_SHARE = 0.02
MAX_SWITCHES_PER_S = 50


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds and context switches of a process, all its threads together."""

    cpu: float
    switches: int


def spent(process: psutil.Process) -> Spent:
    times = process.cpu_times()
    switches = 0
    for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
        lines = status.read_text().splitlines()
        switches += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return Spent(times.user + times.system, switches)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_up_is_idle_without_requests(served: UpProcess) -> None:
    """No other test has used these processes: its requests might have started pools."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]}
    httpx.post(f"{served.url}/v1/chat/completions", json=body).raise_for_status()
    processes = [psutil.Process(served.pid), *served.children()]
    assert len(processes) == 4, "an earlier test has used them"
    before = [spent(process) for process in processes]
    time.sleep(IDLE_S)  # the measured period, not a wait for something
    for process, then in zip(processes, before, strict=True):
        now = spent(process)
        name = " ".join(process.cmdline())
        assert now.cpu - then.cpu < MAX_CPU_SHARE * IDLE_S, name
        assert now.switches - then.switches < MAX_SWITCHES_PER_S * IDLE_S, name
