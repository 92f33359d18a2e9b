"""The gateway's part of placement: it names engines with a recent heartbeat."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.kv_events import BlockFilter, KVEvent, encode_event
from headrace_common.wire.block_hashes import (
    MIN_BITS,
    block_hash,
    block_position,
    prefix_seed,
)
from headrace_common.wire.messages import Tokens
from headrace_gateway.queue_client.cached_prefixes import LIFETIME_S, RESTART_S, CachedPrefixes
from headrace_gateway.queue_client.client import GenerationClient
from headrace_gateway.queue_client.engines import EngineDirectory
from headrace_gateway.queue_client.prefix_routing import PrefixRouter
from headrace_testing.backends import MODEL, InMemory, make_request, make_status

ENGINES = ("a", "b")


class Told:
    """A KVEventReader of what tests tell for engines."""

    def __init__(self) -> None:
        self.events: dict[str, list[tuple[str, bytes]]] = {}
        self.reads: list[dict[str, str]] = []
        self.available = True

    def tell(self, engine_id: str, event: KVEvent) -> None:
        self.events.setdefault(engine_id, []).append((f"{event.number}-0", encode_event(event)))

    async def read(
        self, model: str, after: Mapping[str, str]
    ) -> Mapping[str, Sequence[tuple[str, bytes]]]:
        assert model == MODEL
        self.reads.append(dict(after))
        if not self.available:
            raise BackendUnavailable("away")
        return {
            engine: [each for each in self.events.get(engine, ()) if not last or each[0] > last]
            for engine, last in after.items()
        }


def whole(number: int, prompt: Sequence[int] = (), tokens: int = 0) -> KVEvent:
    """An engine's event: it has the first tokens of a prompt cached, in blocks of four."""
    known, before = BlockFilter(MIN_BITS, 4), prefix_seed(b"", None)
    for begin in range(0, tokens, 4):
        before = block_hash(before, prompt, (), begin, begin + 4)
        known.change([block_position(before, MIN_BITS)], ())
    return KVEvent(number=number, block_size=4, bits=MIN_BITS, whole=known.whole)


def placer_of(
    memory: InMemory, told: Told | None = None, clock: Callable[[], float] = time.monotonic
) -> PrefixRouter:
    directory = EngineDirectory(memory.gateway("directory"))
    cached = CachedPrefixes(told or Told(), clock)
    return PrefixRouter(directory, cached, prefix_tokens=4, load_factor=1.25, steal_after=3600.0)


async def test_prompts_with_the_same_beginning_are_taken_by_one_engine() -> None:
    memory = InMemory()
    engines = [memory.engine(name) for name in ENGINES]
    for engine in engines:
        await engine.beat((), make_status(engine.engine_id))
    client = GenerationClient(memory.gateway(), QueueLimits(), placer=placer_of(memory))
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


PROMPT = tuple(range(2000))


async def test_a_prompt_goes_to_the_engine_that_has_most_of_it() -> None:
    memory, told = InMemory(), Told()
    engines = {name: memory.engine(name) for name in ENGINES}
    for name, engine in engines.items():
        await engine.beat((), make_status(name))
    for a, b in ((400, 1200), (1200, 400)):  # long enough that a thread computes hashes
        told.events.clear()
        told.tell("a", whole(1, PROMPT, a))
        told.tell("b", whole(1, PROMPT, b))
        placer = placer_of(memory, told)
        client = GenerationClient(memory.gateway(), QueueLimits(), placer=placer)
        await client.start()
        generation = await client.submit(make_request(prompt=PROMPT))
        assert generation.placement is not None
        believed = {each.engine_id: each.cached_tokens for each in generation.placement.candidates}
        assert believed == {"a": a, "b": b}
        best = "a" if a > b else "b"
        (lease,) = await engines[best].take(9)
        assert lease.placed
        first = Tokens(
            lease.request.request_id, 1, 0, 0, (7,), finish_reason="stop", cached_tokens=1184
        )
        await engines[best].publish({"g": [first]})
        async for _ in generation:
            pass
        counted = {"prompt": 2000, "known": 1200, "expected": 1200, "found": 1184}
        assert placer.tokens == {(MODEL, kind): tokens for kind, tokens in counted.items()}
        await client.close()


class Watch:
    """What a gateway knows of engines, by a clock that tests move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told = Told()
        self.cached = CachedPrefixes(self.told, lambda: self.now)

    async def knows(self, *engine_ids: str) -> dict[str, bytes]:
        self.now += LIFETIME_S
        filters = await self.cached.filters(MODEL, engine_ids)
        return {engine: known.whole for engine, known in filters.items()}


async def test_a_burst_of_requests_reads_events_once() -> None:
    watch = Watch()
    watch.told.tell("a", whole(1))
    await asyncio.gather(*(watch.cached.filters(MODEL, ["a"]) for _ in range(9)))
    await watch.cached.filters(MODEL, ["a"])
    assert watch.told.reads == [{"a": ""}]
    await watch.knows("a")
    assert watch.told.reads[1:] == [{"a": "1-0"}]


async def test_an_engine_that_is_gone_is_forgotten() -> None:
    watch = Watch()
    watch.told.tell("a", whole(1))
    assert list(await watch.knows("a", "b")) == ["a"]
    assert await watch.knows("b") == {}
    assert list(await watch.knows("a", "b")) == ["a"]
    assert watch.told.reads[-1] == {"a": "", "b": ""}


async def test_lost_and_unreadable_events_are_read_again_from_the_begin() -> None:
    watch = Watch()
    watch.told.tell("a", whole(1))
    await watch.knows("a")
    watch.told.tell("a", KVEvent(number=3, block_size=4, bits=MIN_BITS, added=(1,)))
    assert await watch.knows("a") == {}
    watch.told.events["a"] = []
    watch.told.tell("a", whole(4, PROMPT, 4))
    assert await watch.knows("a") == {"a": whole(4, PROMPT, 4).whole}
    watch.told.events["a"].append(("5-0", b"no event"))
    watch.told.tell("a", KVEvent(number=6, block_size=4, bits=MIN_BITS, added=(1,)))
    assert await watch.knows("a") == {}


async def test_a_quiet_engine_is_read_from_the_begin_from_time_to_time() -> None:
    watch = Watch()
    watch.told.tell("a", whole(9))
    await watch.knows("a")
    watch.told.events["a"] = []
    watch.told.tell("a", whole(5, PROMPT, 4))  # Redis' clock was set back
    assert await watch.knows("a") == {"a": whole(9).whole}
    watch.now += RESTART_S
    assert await watch.knows("a") == {"a": whole(5, PROMPT, 4).whole}


async def test_while_redis_is_away_requests_are_placed_by_what_was_known() -> None:
    watch = Watch()
    watch.told.tell("a", whole(1))
    before = await watch.knows("a")
    watch.told.available = False
    assert await watch.knows("a") == before
