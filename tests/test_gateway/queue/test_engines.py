"""The engines that a gateway knows of."""

import asyncio

import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import CanaryPlan, EngineStatus
from headrace_gateway.queue_client.engines import LIFETIME_S, EngineDirectory
from headrace_testing.backends import MODEL, make_status


class Slow:
    """A queue that answers when it is told to, and counts how often it is read."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[list[EngineStatus]] = asyncio.Future()
        self.reads = 0
        self.now = 0.0

    async def engines(self, model: str) -> list[EngineStatus]:
        self.reads += 1
        return await self.answer

    async def canary_plan(self, model: str) -> CanaryPlan:
        return CanaryPlan()


async def test_a_burst_of_requests_reads_the_engines_once() -> None:
    queue = Slow()
    directory = EngineDirectory(queue, lambda: queue.now)
    asking = [asyncio.create_task(directory.engines(MODEL)) for _ in range(100)]
    await asyncio.sleep(0)
    asking[0].cancel()
    await asyncio.sleep(0)
    queue.answer.set_result([make_status()])
    first, *others = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert others == [[make_status()]] * 99
    assert await directory.engines(MODEL) == [make_status()]
    assert queue.reads == 1

    queue.now += LIFETIME_S
    await directory.engines(MODEL)
    assert queue.reads == 2


async def test_all_who_wait_for_a_reply_get_its_error_and_the_next_one_asks_again() -> None:
    queue = Slow()
    directory = EngineDirectory(queue, lambda: queue.now)
    asking = [asyncio.create_task(directory.engines(MODEL)) for _ in range(2)]
    await asyncio.sleep(0)
    queue.answer.set_exception(BackendUnavailable("redis: connection refused"))
    assert [str(one) for one in await asyncio.gather(*asking, return_exceptions=True)] == [
        "redis: connection refused"
    ] * 2
    with pytest.raises(BackendUnavailable):
        await directory.engines(MODEL)
    assert queue.reads == 2
