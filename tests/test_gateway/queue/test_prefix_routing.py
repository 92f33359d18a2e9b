"""The gateway's part of placement: it names engines with a recent heartbeat."""

from dataclasses import replace

from headrace_common.protocol.base import QueueLimits
from headrace_gateway.queue_client.client import GenerationClient
from headrace_gateway.queue_client.engines import EngineDirectory
from headrace_gateway.queue_client.prefix_routing import PrefixRouter
from headrace_testing.backends import InMemory, make_request, make_status

ENGINES = ("a", "b")


def placer_of(memory: InMemory) -> PrefixRouter:
    directory = EngineDirectory(memory.gateway("directory"))
    return PrefixRouter(directory, prefix_tokens=4, load_factor=1.25, steal_after=3600.0)


async def test_prompts_with_the_same_beginning_are_taken_by_one_engine() -> None:
    memory = InMemory()
    engines = [memory.engine(name) for name in ENGINES]
    for engine in engines:
        await engine.beat((), make_status(engine.engine_id))
    client = GenerationClient(memory.gateway(), QueueLimits(), place=placer_of(memory).place)
    await client.start()
    for beginning in range(12):
        taken = []
        for ending in range(2):
            prompt = (beginning, beginning, beginning, beginning, ending)
            await client.submit(make_request(prompt=prompt))
            for engine in engines:
                for lease in await engine.take(9):
                    assert lease.placed
                    taken.append(engine.engine_id)
                    await client.queue.cancel(lease.request.request_id, lease.request.model)
        assert taken in (["a", "a"], ["b", "b"])
    await client.close()


async def test_any_engine_may_take_a_request_if_the_gateway_knows_no_placement() -> None:
    memory = InMemory()
    placer = placer_of(memory)
    memory.store.available = False
    assert await placer.place(make_request()) is None
    memory.store.available = True
    assert await placer.place(make_request()) is None
    for name in ENGINES:
        status = make_status(name)
        await memory.engine(name).beat((), replace(status, draining=name == "a"))
    assert await placer_of(memory).place(make_request()) is None
