"""Policies with a queue: which requests the worker takes, and how clients learn that they have
ended.

The queue is in memory, the runner a fake one that waits at a gate before each step.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Semaphore
from typing import Any

import pytest

from headrace_common.config.process import read_settings
from headrace_common.errors import FailureCode
from headrace_common.protocol.base import GatewayQueue, QueueLimits
from headrace_common.wire.messages import Failed, Reply, Takeover, Tokens
from headrace_engine.__main__ import _load
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.step_plan import SchedulerOutput, StepResult
from headrace_engine.engine.engine import Engine
from headrace_engine.scheduler.policies import Policy, make_policy
from headrace_engine.scheduler.policies.deadline import Deadline
from headrace_engine.scheduler.policies.fcfs import Fcfs
from headrace_engine.scheduler.policies.priority import Priority
from headrace_engine.serving.settings import EngineSettings
from headrace_testing.backends import MODEL, InMemory, make_request
from headrace_testing.engine import make_config
from headrace_testing.fake_runner import FakeRunner
from headrace_testing.waiting import eventually
from headrace_testing.workers import make_worker


class GatedRunner(FakeRunner):
    """Begins a step when the test lets one through; `begun` counts the steps that reached the
    gate."""

    def __init__(self) -> None:
        super().__init__(max_model_len=100_000, num_blocks=64, eos_token_ids=frozenset())
        self.gate = Semaphore(0)
        self.begun = 0

    def execute(self, scheduler_output: SchedulerOutput) -> StepResult:
        self.begun += 1
        assert self.gate.acquire(timeout=30)
        return super().execute(scheduler_output)


class Service:
    """A running worker, one gateway, and all replies to the gateway."""

    def __init__(self, policy: Policy, *, lookahead: int, **options: Any) -> None:
        usual = {"max_num_seqs": 1, **options}
        self.backend = InMemory()
        self.gateway: GatewayQueue = self.backend.gateway()
        self.runner = GatedRunner()
        self.engine = engine = Engine(
            make_config(max_num_seqs=usual["max_num_seqs"]), self.runner, policy
        )
        self.worker = make_worker(
            engine,
            self.backend.engine(),
            self.runner.block_size,
            lookahead=lookahead,
            **usual,
        )
        self.replies: list[Reply] = []

    async def listen(self) -> None:
        async for frame in self.gateway.frames():
            self.replies += frame.replies

    async def admit(self, request_id: str, **options: int) -> None:
        prompt = (ord(request_id[-1]) % 40 + 1,)
        request = make_request(request_id=request_id, prompt=prompt, **options)
        await self.gateway.admit(request, QueueLimits())

    async def taken(self, waiting: int = 0) -> None:
        """Waits until the engine has left `waiting` requests in the queue and is at the gate."""

        async def holds() -> bool:
            return (await self.gateway.depth(MODEL)).waiting == waiting and self.runner.begun > 0

        await eventually(holds)

    async def stood_at_gate(self, times: int) -> None:
        async def stands() -> bool:
            return self.runner.begun >= times

        await eventually(stands)

    async def ended(self, count: int) -> None:
        async def over() -> bool:
            return sum(is_end(reply) for reply in self.replies) >= count

        await eventually(over)

    def first_tokens(self) -> list[str]:
        tokens = [reply for reply in self.replies if isinstance(reply, Tokens)]
        return [reply.request_id for reply in tokens if reply.index == 0 and reply.token_ids]


def is_end(reply: Reply) -> bool:
    return isinstance(reply, Failed) or (
        isinstance(reply, Tokens) and reply.finish_reason is not None
    )


@asynccontextmanager
async def serving(policy: Policy, *, lookahead: int) -> AsyncIterator[Service]:
    async with run(Service(policy, lookahead=lookahead)) as service:
        yield service


@asynccontextmanager
async def run(service: Service) -> AsyncIterator[Service]:
    await service.gateway.start()
    tasks = [asyncio.create_task(service.listen()), asyncio.create_task(service.worker.run())]
    try:
        yield service
    finally:
        service.runner.gate.release(10_000)
        service.worker.drain()
        await tasks[1]
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)


async def test_a_request_given_back_by_an_engine_goes_before_waiting_ones() -> None:
    service = Service(Fcfs(), lookahead=0)
    other = service.backend.engine("other")
    await service.admit("begun")
    for name in "abc":
        await service.admit(name)
    assert [lease.request.request_id for lease in await other.take(1, None)] == ["begun"]
    await other.give_back(["begun"])
    async with run(service):

        async def spoken_of() -> bool:
            return bool(service.replies)

        await eventually(spoken_of)
        assert isinstance(service.replies[0], Takeover)
        assert service.replies[0].request_id == "begun"


async def test_the_engine_takes_more_than_it_can_start_for_the_policy_to_choose_from() -> None:
    async with serving(Priority(), lookahead=3) as service:
        await service.admit("a", max_tokens=50)
        await service.taken()
        for name, priority in (("b", 0), ("c", 0), ("urgent", -1)):
            await service.admit(name, priority=priority)
        await service.taken()
        while service.engine.stats().waiting < 3:
            begun = service.runner.begun
            service.runner.gate.release(1)
            await service.stood_at_gate(begun + 1)
        await service.admit("d")
        service.runner.gate.release(10_000)
        await service.ended(5)
        first, chosen, *equals, last = service.first_tokens()
        assert (first, chosen, last) == ("a", "urgent", "d")
        assert {*equals} == {"b", "c"}, "they came within a millisecond"


async def test_without_lookahead_requests_that_cannot_start_stay_in_the_queue() -> None:
    async with serving(Fcfs(), lookahead=0) as service:
        await service.admit("a")
        await service.taken()
        await service.admit("b")
        service.runner.gate.release(1)
        await service.stood_at_gate(2)
        assert (await service.gateway.depth(MODEL)).waiting == 1


async def test_low_priority_leaves_its_share_of_the_sequences_free() -> None:
    service = Service(Fcfs(), lookahead=0, max_num_seqs=4, low_priority_share=0.5)
    for name in "abc":
        await service.admit(name, priority=1, max_tokens=50)
    async with run(service):
        await service.taken(waiting=1)
        for name in "de":
            await service.admit(name)
        await service.taken(waiting=1)
        depth = await service.gateway.depth(MODEL)
        assert (depth.pending, depth.low_pending, depth.low_waiting) == (4, 2, 1)
        service.runner.gate.release(10_000)
        await service.ended(5)


async def test_running_work_ends_at_its_deadline_with_its_partial_output() -> None:
    clock = time.monotonic()
    policy = Deadline(clock=lambda: clock)
    async with serving(policy, lookahead=1) as service:
        await service.admit("a", max_tokens=50)
        await service.taken()
        service.runner.gate.release(3)
        await service.stood_at_gate(4)
        clock += 700.0
        service.runner.gate.release(1)
        await service.ended(1)
        replies = [reply for reply in service.replies if isinstance(reply, Tokens)]
        assert [reply.index for reply in replies] == [0, 1, 2, 3, 4]
        assert (replies[-1].finish_reason, replies[-1].token_ids) == ("length", ())
        assert not [reply for reply in service.replies if isinstance(reply, Failed)]


async def test_work_that_was_not_begun_fails_with_the_reason() -> None:
    clock = time.monotonic()
    async with serving(Deadline(clock=lambda: clock), lookahead=1) as service:
        await service.admit("a", max_tokens=50)
        await service.taken()
        await service.admit("b", seconds=60)
        await service.taken()
        clock += 100.0
        service.runner.gate.release(10_000)
        await service.ended(2)
        (failed,) = (reply for reply in service.replies if isinstance(reply, Failed))
        assert (failed.request_id, failed.failure) == ("b", FailureCode.DEADLINE)
        assert failed.message == "its deadline is over"


def test_the_lookahead_is_a_batch_unless_the_policy_is_fcfs() -> None:
    def ahead(**given: Any) -> int:
        return EngineSettings(model="m", max_num_seqs=7, **given).taken_ahead

    assert (ahead(), ahead(policy="sjf"), ahead(policy="sjf", lookahead=2)) == (0, 7, 2)


def test_a_policy_and_its_options_come_from_the_command_line() -> None:
    weights = '{"weights": {"research": 2.0}}'
    flags = ["--model", "m", "--policy", "fair", "--policy-options", weights]
    settings = read_settings(EngineSettings, "headrace engine", flags)
    assert settings is not None
    config = settings.engine_config()
    assert (config.policy, config.policy_options) == ("fair", {"weights": {"research": 2.0}})
    assert make_policy(config.policy, config.policy_options).name == "fair"


@pytest.mark.parametrize("wrong", [{"policy": "lifo"}, {"policy_options": {"ageing": 1}}])
def test_a_wrong_policy_stops_the_start_before_the_model_is_loaded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="policy"):
        _load(EngineSettings(model="/no/such/folder", **wrong))
