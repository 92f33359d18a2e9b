"""best_of and beam search behind a queue: one reply for each choice, at the end, even after a
takeover."""

import asyncio
from dataclasses import replace

from headrace_common.protocol.base import QueueLimits
from headrace_common.sampling.params import SamplingParams
from headrace_common.wire.messages import Tokens
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine
from headrace_testing.backends import InMemory, make_request
from headrace_testing.engine import make_config
from headrace_testing.fake_runner import FakeRunner
from headrace_testing.waiting import eventually
from headrace_testing.workers import make_worker

BEAMS = SamplingParams(n=2, best_of=3, use_beam_search=True, max_tokens=6, seed=1)
BEST = SamplingParams(n=2, best_of=3, max_tokens=6, seed=1)


async def replies_to(params: SamplingParams, runner: FakeRunner) -> list[Tokens]:
    """The messages that a gateway gets about one request."""
    backend = InMemory()
    gateway = backend.gateway()
    engine = Engine(make_config(), runner)
    worker = make_worker(engine, backend.engine(), runner.block_size)
    told: list[Tokens] = []

    async def listen() -> None:
        async for frame in gateway.frames():
            told.extend(reply for reply in frame.replies if isinstance(reply, Tokens))

    async def over() -> bool:
        return sum(reply.finish_reason is not None for reply in told) == params.n

    await gateway.start()
    tasks = [asyncio.create_task(listen()), asyncio.create_task(worker.run())]
    request = replace(make_request(request_id="a", prompt=(3, 1, 4)), sampling=params)
    await gateway.admit(request, QueueLimits())
    await eventually(over)
    worker.drain()
    await tasks[1]
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    return told


def core_request(params: SamplingParams) -> EngineRequest:
    return EngineRequest(request_id="a", prompt_token_ids=(3, 1, 4), params=params, seed=1)


async def test_the_best_beams_are_returned_complete_and_in_order() -> None:
    runner = FakeRunner()
    told = await replies_to(BEAMS, runner)
    found = runner.expected_beams(core_request(BEAMS))
    assert [(reply.choice, reply.index) for reply in told] == [(0, 0), (1, 0)]
    assert [reply.token_ids for reply in told] == [each.tokens for each in found]


async def test_the_best_choices_are_returned_complete_and_in_order() -> None:
    runner = FakeRunner()
    told = await replies_to(BEST, runner)
    assert [(reply.choice, reply.index) for reply in told] == [(0, 0), (1, 0)]
    assert [reply.token_ids for reply in told] == runner.expected_best(core_request(BEST))
