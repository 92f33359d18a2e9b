"""A worker that sleeps: no token is lost, and it takes work again when it is awake.

The queue is in memory, the runner a fake one that refuses steps while it sleeps.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from threading import Semaphore

import pytest

from headrace_common.protocol.base import EngineStatus, QueueLimits
from headrace_common.wire.messages import Reply, Takeover, Tokens
from headrace_engine.core.config import SleepLevel
from headrace_engine.core.step_plan import SchedulerOutput, StepResult
from headrace_engine.engine.engine import Engine
from headrace_engine.engine.engine_loop import EngineLoop
from headrace_engine.serving.sleep_pages import SleepPages
from headrace_testing.backends import MODEL, InMemory, make_request
from headrace_testing.engine import make_config
from headrace_testing.fake_runner import FakeRunner
from headrace_testing.waiting import eventually
from headrace_testing.workers import make_worker


class GatedRunner(FakeRunner):
    """Begins a step when the test lets one through; `begun` counts the steps at the gate."""

    def __init__(self) -> None:
        super().__init__(eos_token_ids=frozenset())
        self.gate = Semaphore(0)
        self.begun = 0

    def execute(self, scheduler_output: SchedulerOutput) -> StepResult:
        self.begun += 1
        assert self.gate.acquire(timeout=60)
        return super().execute(scheduler_output)


class Service:
    """A running worker, a gateway, and the replies that it got."""

    def __init__(self) -> None:
        self.backend = InMemory()
        self.gateway = self.backend.gateway()
        self.runner = GatedRunner()
        engine = Engine(make_config(), self.runner)
        self.worker = make_worker(engine, self.backend.engine(), self.runner.block_size)
        self.sleeper = self.worker.sleeper
        self.replies: list[Reply] = []
        self.running: asyncio.Task[None]

    async def listen(self) -> None:
        async for frame in self.gateway.frames():
            self.replies += frame.replies

    async def admit(self, request_id: str) -> None:
        request = make_request(request_id=request_id, prompt=(5, 7), max_tokens=6)
        await self.gateway.admit(request, QueueLimits())

    async def status(self) -> EngineStatus:
        (status,) = await self.gateway.engines(MODEL)
        return status

    def output(self, request_id: str) -> list[int]:
        tokens = [reply for reply in self.replies if isinstance(reply, Tokens)]
        own = [reply for reply in tokens if reply.request_id == request_id]
        return [token for reply in own for token in reply.token_ids]

    def takeovers(self) -> int:
        return sum(isinstance(reply, Takeover) for reply in self.replies)

    def let_all_through(self) -> None:
        self.runner.gate.release(10_000)


async def reached(condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    await eventually(holds)


@asynccontextmanager
async def serving() -> AsyncIterator[Service]:
    service = Service()
    await service.gateway.start()
    listening = asyncio.create_task(service.listen())
    service.running = asyncio.create_task(service.worker.run())
    try:
        yield service
    finally:
        service.let_all_through()
        service.worker.end()
        await service.running
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def at_the_gate(service: Service, request_id: str) -> None:
    await service.admit(request_id)
    await reached(lambda: service.runner.begun > 0)


def sleeping(service: Service, level: SleepLevel = 1, timeout: float = 60.0) -> Awaitable[bool]:
    return asyncio.create_task(service.sleeper.sleep(level, timeout))


async def test_running_requests_end_before_the_engine_sleeps() -> None:
    async with serving() as service:
        await at_the_gate(service, "a")
        asleep = sleeping(service)
        await reached(lambda: service.sleeper.wanted == 1)
        assert service.sleeper.level is None
        service.let_all_through()
        assert await asleep
        assert len(service.output("a")) == 6 and service.takeovers() == 0
        assert service.runner.sleep_level == 1


async def test_what_runs_at_the_timeout_is_given_back_and_continued_after_the_sleep() -> None:
    async with serving() as service:
        await at_the_gate(service, "a")
        service.runner.gate.release(2)
        await reached(lambda: service.runner.begun >= 3)
        asleep = sleeping(service, 2, timeout=0.0)
        await reached(lambda: service.sleeper.wanted == 2)
        service.let_all_through()
        assert await asleep
        assert service.runner.sleep_level == 2
        depth = await service.gateway.depth(MODEL)
        assert depth.pending == 1 and service.takeovers() == 0
        assert await service.sleeper.wake_up()
        await reached(lambda: service.takeovers() == 1)
        await service.gateway.cancel("a", MODEL)


async def test_requests_wait_until_the_engine_is_awake() -> None:
    async with serving() as service:
        service.let_all_through()
        assert await sleeping(service)
        await service.admit("a")
        assert (await service.gateway.depth(MODEL)).waiting == 1
        assert await service.sleeper.wake_up()
        await reached(lambda: len(service.output("a")) == 6)


async def test_the_status_says_that_it_sleeps() -> None:
    async with serving() as service:
        await eventually(lambda: _has_level(service, 0))
        await sleeping(service, 2)
        await eventually(lambda: _has_level(service, 2))
        assert not (await service.status()).takes_work
        await service.sleeper.wake_up()
        await eventually(lambda: _has_level(service, 0))


async def _has_level(service: Service, level: int) -> bool:
    found = await service.gateway.engines(MODEL)
    return [status.sleep_level for status in found] == [level]


async def test_an_engine_that_falls_asleep_can_be_woken_before() -> None:
    async with serving() as service:
        await at_the_gate(service, "a")
        asleep = sleeping(service)
        await reached(lambda: service.sleeper.wanted == 1)
        assert await service.sleeper.wake_up()
        assert not await asleep
        service.let_all_through()
        await service.admit("b")
        await reached(lambda: len(service.output("b")) == 6)
        assert service.takeovers() == 0


async def test_a_drained_engine_sleeps_on_and_ends() -> None:
    async with serving() as service:
        service.let_all_through()
        assert await sleeping(service)
    assert service.runner.sleep_level == 1


async def test_the_end_waits_for_the_step_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are given back; the step goes on until the loop, told to stop, is waited for."""
    async with serving() as service:
        join, joined = EngineLoop.join, set[EngineLoop]()

        def let_through_and_join(loop: EngineLoop, timeout: float) -> bool:
            service.let_all_through()
            joined.add(loop)
            return join(loop, timeout)

        monkeypatch.setattr(EngineLoop, "join", let_through_and_join)
        await at_the_gate(service, "a")
        service.worker.drain(within=0)
        service.worker.end()
        await service.running
        (loop,) = joined
        assert not loop.alive


@pytest.mark.parametrize("level", [1, 2])
async def test_pages_put_to_sleep_and_wake(level: int) -> None:
    async with serving() as service:
        service.let_all_through()
        pages = SleepPages(service.sleeper, asyncio.get_running_loop()).pages()

        async def ask(path: str, **query: str) -> tuple[HTTPStatus, bytes]:
            status, _, body = await asyncio.to_thread(pages[path].answer, query)
            return status, body

        awake, asleep = b'{"is_sleeping": false, "level": 0}', b'{"is_sleeping": true, "level": %d}'
        assert await ask("/is_sleeping") == (HTTPStatus.OK, awake)
        for _ in range(2):
            assert await ask("/sleep", level=str(level)) == (HTTPStatus.OK, asleep % level)
        assert await ask("/is_sleeping") == (HTTPStatus.OK, asleep % level)
        other = str(3 - level)
        assert await ask("/sleep", level=other) == (HTTPStatus.CONFLICT, asleep % level)
        for _ in range(2):
            assert await ask("/wake_up") == (HTTPStatus.OK, awake)


@pytest.mark.parametrize(
    ("path", "query"),
    [("/sleep", {"level": "3"}), ("/sleep", {"mode": "abort"}), ("/wake_up", {"tags": "weights"})],
)
async def test_pages_refuse_what_they_do_not_know(path: str, query: dict[str, str]) -> None:
    async with serving() as service:
        pages = SleepPages(service.sleeper, asyncio.get_running_loop()).pages()
        status, _, body = pages[path].answer(query)
        assert status == HTTPStatus.BAD_REQUEST and next(iter(query)).encode() in body
        assert service.sleeper.wanted is None
