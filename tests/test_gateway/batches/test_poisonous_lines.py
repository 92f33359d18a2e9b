"""A batch's line that crashes the gateway that runs it: real processes, which are killed while it
runs."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_common.wire import keys
from headrace_gateway.batches.crash_counts import (
    MAX_GATEWAYS,
    READING_INPUT,
    WRITING_RESULTS,
    SharedExclusiveLock,
)
from headrace_gateway.models.models import Models
from headrace_testing.backends import MODEL, OverRedis
from headrace_testing.batches import BatchClient, batch_gateway, line
from headrace_testing.fake_engine import FakeEngine
from headrace_testing.forked import Forge
from headrace_testing.processes import HeadraceProcess
from headrace_testing.waiting import eventually

POISON = 2


@pytest.fixture
def over(over_redis: OverRedis) -> OverRedis:
    return over_redis


@asynccontextmanager
async def engine_of(over: OverRedis) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(over.engine(), MODEL)
    running = asyncio.create_task(engine.run())
    yield engine
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class Leaders:
    """Gateway processes, one after the other, that lead one batch until they are killed."""

    def __init__(self, over: OverRedis, checkpoint: Path, folder: Path) -> None:
        self._over = over
        self._checkpoint = checkpoint
        self._folder = folder
        self.batch_id = ""

    @asynccontextmanager
    async def next(self) -> AsyncIterator[BatchClient]:
        """Starts the next gateway that may lead the batch. It is killed at the end."""
        if self.batch_id:  # as if the previous leader's lease had expired
            await self._over.client.command("DEL", keys.batch_lease(self.batch_id))
        flags = ["--model", str(self._checkpoint), "--served-model-name", MODEL, "--port", "0"]
        flags += ["--redis-url", self._over.config.url, "--log-format", "json"]
        log = self._folder / "gateway.log"
        log.unlink(missing_ok=True)
        with HeadraceProcess("headrace_gateway", flags, log, start=Forge().start) as process:
            ready = await asyncio.to_thread(process.await_log, "gateway ready")
            async with httpx.AsyncClient(base_url=str(ready["address"]), timeout=60) as http:
                yield BatchClient(http)

    async def starts(self) -> dict[int, set[str]]:
        """The gateways that have started each line and not ended it."""
        found: dict[int, set[str]] = {}
        name = keys.batch_starts(self.batch_id)
        for start in await self._over.client.command("ZRANGE", name, 0, -1):
            number, _, gateway = start.decode().partition(":")
            found.setdefault(int(number), set()).add(gateway)
        return found

    async def until_started(self, lines: Collection[int], times: int) -> dict[int, set[str]]:
        async def started() -> bool:
            found = await self.starts()
            return all(len(found.get(number, ())) == times for number in lines)

        await eventually(started)
        return await self.starts()


async def test_a_poisonous_line_fails_after_three_crashes_and_other_lines_succeed(
    over: OverRedis, checkpoint: Path, tmp_path: Path
) -> None:
    leaders = Leaders(over, checkpoint, tmp_path)
    lines = [line("a", max_tokens=2), line("poison", max_tokens=4000), line("b", max_tokens=2)]
    async with leaders.next() as client:
        leaders.batch_id = await client.begin(lines)
        await leaders.until_started((1, 2, 3), 1)  # there is no engine yet, so all of them run
    async with leaders.next():
        before = await leaders.until_started((1, 2, 3), 2)
    known = set.union(*before.values())
    async with engine_of(over) as engine:
        async with leaders.next():
            now = await leaders.until_started([POISON], 3)
        assert {number for number, who in now.items() if who - known} == {POISON}
        async with leaders.next() as client:
            batch = await client.ended(leaders.batch_id)
            answers = await client.content(batch["output_file_id"])
            errors = await client.content(batch["error_file_id"])

        async def idle() -> bool:
            return not engine.active

        await eventually(idle)

    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert set(answers) == {"a", "b"}
    assert errors["poison"]["error"]["code"] == "request_failed"
    assert errors["poison"]["error"]["message"].startswith("3 gateways ended")
    assert await leaders.starts() == {}


@pytest.mark.parametrize("work", [READING_INPUT, WRITING_RESULTS])
async def test_a_batch_whose_files_crash_gateways_fails(
    over: OverRedis, served: Models, work: int
) -> None:
    async with batch_gateway(over, served, "g1", max_running_batches=1) as http:
        client = BatchClient(http)
        await client.begin([line("first", max_tokens=4000)])  # it has the only slot
        batch_id = await client.begin([line("a")])
        name = keys.batch_starts(batch_id)
        for gateway in range(MAX_GATEWAYS):
            await over.client.command("ZADD", name, 1, f"{work}:dead{gateway}")
        async with batch_gateway(over, served, "g2") as other:
            batch = await BatchClient(other).ended(batch_id)

    assert batch["status"] == "failed"
    (error,) = batch["errors"]["data"]
    assert error["code"] == "request_failed" and "3 gateways ended" in error["message"]


async def test_a_gateway_that_leaves_its_batch_to_others_has_not_ended(
    over: OverRedis, served: Models, checkpoint: Path, tmp_path: Path
) -> None:
    leaders = Leaders(over, checkpoint, tmp_path)
    async with batch_gateway(over, served, "g1") as http:
        leaders.batch_id = await BatchClient(http).begin([line("a"), line("b")])
        await leaders.until_started((1, 2), 1)

    assert await leaders.starts() == {}


async def test_a_gateway_that_lost_its_lease_has_not_ended(
    over: OverRedis, served: Models, checkpoint: Path, tmp_path: Path
) -> None:
    leaders = Leaders(over, checkpoint, tmp_path)
    async with batch_gateway(over, served, "g1") as http:
        leaders.batch_id = await BatchClient(http).begin([line("a"), line("b")])
        await leaders.until_started((1, 2), 1)
        await over.client.command("SET", keys.batch_lease(leaders.batch_id), "another")

        async def left() -> bool:
            return await leaders.starts() == {}

        await eventually(left)


async def test_a_suspect_runs_without_any_other_line() -> None:
    turns, order = SharedExclusiveLock(), list[str]()
    go = asyncio.Event()

    async def run(name: str, turn: Any) -> None:
        async with turn:
            order.append(f"{name} begins")
            await go.wait()
            order.append(f"{name} ends")

    async with asyncio.TaskGroup() as group:
        for name, turn in (
            ("first", turns.shared()),
            ("suspect", turns.exclusive()),
            ("other suspect", turns.exclusive()),
            ("second", turns.shared()),
        ):
            group.create_task(run(name, turn))
        for _ in range(10):
            await asyncio.sleep(0)
        assert order == ["first begins"]
        go.set()

    assert order[:4] == ["first begins", "first ends", "suspect begins", "suspect ends"]
    assert sorted(order[4:]) == [
        "other suspect begins",
        "other suspect ends",
        "second begins",
        "second ends",
    ]
    for name in ("other suspect", "second"):
        assert order.index(f"{name} ends") == order.index(f"{name} begins") + 1
