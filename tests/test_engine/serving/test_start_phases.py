"""The time of an engine's start is divided into phases without a gap, and announced meanwhile."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_common.protocol.live import EngineStart
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.starts import RedisStarts
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.start_phases import PHASES, StartPhases, process_age
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.serving.start_notice import announced_start
from headrace_testing.valkey import ValkeyServer, free_port
from headrace_testing.waiting import eventually

CheckpointMaker = Callable[[str], Path]
MODEL = "m"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path / "valkey", appendonly=False)
    server.start()
    yield server
    server.stop()


def test_each_moment_since_the_process_began_belongs_to_one_phase() -> None:
    clock = Clock()
    phases = StartPhases(age=0.5, clock=clock)
    for phase, seconds in (("imports", 0.25), ("weights", 2.0), ("imports", 1.0)):
        phases.begin(phase)
        clock.now += seconds
    assert (phases.current, phases.age) == ("imports", 3.75)
    phases.end()
    assert phases.seconds == {"process": 0.5, "imports": 1.25, "weights": 2.0}
    assert phases.summary() == {"seconds": 3.75, "phases": dict(phases.seconds)}


def test_time_after_the_start_does_not_count() -> None:
    clock = Clock()
    phases = StartPhases(clock=clock)
    phases.end()
    clock.now += 10.0
    phases.end()
    assert (phases.current, phases.seconds) == (None, {"process": 0.0})


def test_the_age_of_a_process_is_known() -> None:
    assert process_age() > 0


def test_a_start_on_a_cpu_imports_no_library_that_it_does_not_need() -> None:
    program = """
import sys
import headrace_engine.__main__, headrace_engine.attention.cpu, headrace_engine.models.native
from headrace_engine.attention.flash import find_kernel
find_kernel()
print(*sorted({"triton", "transformers", "torch._dynamo", "huggingface_hub"} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == ""


def test_a_runner_tells_its_phases_in_order(checkpoint: CheckpointMaker) -> None:
    told: list[str] = []
    config = EngineConfig(model=str(checkpoint("llama")), device="cpu", num_blocks=8)
    ModelRunner(config, on_phase=told.append).warm_up()
    distinct = list(dict.fromkeys(told))
    assert distinct == ["device", "weights", "kv_cache", "warm_up", "cuda_graphs"]
    assert set(told) <= set(PHASES)


async def starts(url: str) -> list[EngineStart]:
    connection = Connection(ConnectionConfig(url=url))
    try:
        return list(await RedisStarts(connection, MODEL).read())
    finally:
        await connection.close()


def test_a_starting_engine_says_its_phase_until_it_has_started(valkey: ValkeyServer) -> None:
    phases, config = StartPhases(), ConnectionConfig(url=valkey.url)

    async def announced(phase: str) -> None:
        said = ("e.1", "engine-0", phase)

        async def is_said() -> bool:
            found = await starts(valkey.url)
            return [(one.engine_id, one.name, one.phase) for one in found] == [said]

        await eventually(is_said)

    with announced_start(config, MODEL, "e.1", "engine-0", phases):
        for phase in ("weights", "warm_up"):
            phases.begin(phase)
            asyncio.run(announced(phase))
    assert asyncio.run(starts(valkey.url)) == []


@pytest.mark.parametrize("url", ["redis://127.0.0.1:{port}/0", "no url"])
def test_an_engine_loads_although_its_start_cannot_be_announced(url: str) -> None:
    config = ConnectionConfig(url=url.format(port=free_port()))
    with announced_start(config, MODEL, "e.1", "", StartPhases()):
        loaded = True
    assert loaded
