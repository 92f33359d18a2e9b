"""A registered model whose files crash a gateway ends at most three processes."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from headrace_cli.queues.queues import QueueSession, show_dead
from headrace_cli.tables import Output
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.loads import KEPT_MS, RedisModelLoads
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.registry import RegisteredModel, digest_of
from headrace_common.text.checkpoint import read_files
from headrace_common.wire import keys
from headrace_gateway.models.model_loads import LOAD_S, POLL_S, ModelSetAside, counted
from headrace_testing.forked import Forge
from headrace_testing.processes import HeadraceProcess
from headrace_testing.valkey import ValkeyServer


@pytest.fixture
async def connection(valkey: ValkeyServer) -> AsyncIterator[Connection]:
    connection = Connection(ConnectionConfig(url=valkey.url))
    yield connection
    await connection.client.each("FLUSHALL")
    await connection.close()


async def test_a_model_that_crashed_three_processes_is_not_loaded_again(
    checkpoint: Path, valkey: ValkeyServer, connection: Connection, tmp_path: Path
) -> None:
    files = read_files(checkpoint).contents
    model = RegisteredModel(name="deadly", digest=digest_of(files), max_model_len=99, created=1)
    await RedisModelRegistry(connection).register(model, files)
    forge = Forge("headrace_testing.deadly_files")

    def start(log: Path) -> HeadraceProcess:
        arguments = ["--redis-url", valkey.url, "--port", "0", "--log-format", "json"]
        return HeadraceProcess("headrace_gateway", arguments, log, start=forge.start)

    for number in range(3):
        with start(tmp_path / f"{number}.log") as process:
            assert await asyncio.to_thread(process.wait) == -9
    with start(tmp_path / "survivor.log") as process:
        url = (await asyncio.to_thread(process.await_log, "gateway ready"))["address"]
        async with httpx.AsyncClient(base_url=str(url), timeout=60) as http:
            answer = await http.post("/v1/completions", json={"model": "deadly", "prompt": "x"})
        refused = await asyncio.to_thread(process.await_log, "a registered model cannot be loaded")

    assert answer.status_code == 503
    assert (refused["model"], refused["code"]) == ("deadly", "model_set_aside")
    notes = io.StringIO()
    output = Output(out=Console(file=io.StringIO()), notes=Console(file=notes, width=200))
    session = QueueSession(valkey.url, output)
    await asyncio.to_thread(show_dead, session, "deadly", 10)
    assert "set aside: 3 gateways died while they loaded its files" in notes.getvalue()


async def test_finished_loads_are_not_counted(connection: Connection) -> None:
    gateways = [RedisModelLoads(connection, f"g{number}") for number in range(4)]
    for one in gateways[:3]:
        assert await one.begin("d") is None
        assert await one.begin("d") is None  # repeated
    age = await gateways[3].begin("d")
    assert age is not None and age < LOAD_S
    assert await gateways[3].begin("other") is None
    await gateways[0].end("d")

    assert await gateways[3].begin("d") is None
    assert 0 < await connection.client.command("PTTL", keys.model_loads("d")) <= KEPT_MS


class Scripted:
    """Returns the given results from `begin`, in order."""

    def __init__(self, *ages: float | None) -> None:
        self._ages = list(ages)
        self.ended = 0

    async def begin(self, digest: str) -> float | None:
        return self._ages.pop(0)

    async def end(self, digest: str) -> None:
        self.ended += 1


async def test_a_load_waits_for_live_processes_and_not_for_dead_ones() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    loading = Scripted(1.0, 1.5, None)
    with pytest.raises(ValueError, match="broken"):
        async with counted(loading, "d", sleep):
            raise ValueError("broken")
    assert slept == [POLL_S, POLL_S] and loading.ended == 1

    dead = Scripted(LOAD_S + 1)
    with pytest.raises(ModelSetAside, match="set aside"):
        async with counted(dead, "d", sleep):
            pass
    assert dead.ended == 0
