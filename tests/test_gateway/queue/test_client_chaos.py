"""The gateway's client with fake engines over a real Valkey, while engines and servers fail.

Tokens carry a checksum of all tokens before them, so that a single lost, repeated or foreign token
fails the test. Faults depend on a seed; times are short so that leases expire within the test.
test_chaos tests real processes under the same faults.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from headrace_common.protocol.base import EngineQueue, QueueLimits
from headrace_common.wire.messages import ChoiceState, GenerateRequest, Reply
from headrace_gateway.queue_client.client import ClientConfig, GenerationClient
from headrace_testing.backends import MODEL, OverRedis, make_request
from headrace_testing.fake_engine import POISON_TOKEN, EngineDied, FakeEngine, is_one_history
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import eventually

CONFIG = ClientConfig(beat_interval=0.3, silence=0.5, recheck=0.5, longest_recheck=1.0)


class IsolatedQueue:
    """An engine's queue that reaches no gateway until `reconnect`."""

    def __init__(self, queue: EngineQueue) -> None:
        self._queue = queue
        self._isolated = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def reconnect(self) -> None:
        self._isolated = False

    async def publish(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        if not self._isolated:
            await self._queue.publish(replies)

    async def gateway_alive(self, gateway_id: str) -> bool:
        return not self._isolated and await self._queue.gateway_alive(gateway_id)

    async def journal(self, request_id: str) -> tuple[ChoiceState, ...] | None:
        """The journal without its last half."""
        states = await self._queue.journal(request_id)
        if states is None or not self._isolated:
            return states
        return tuple(ChoiceState(token_ids=s.token_ids[: len(s.token_ids) // 2]) for s in states)


class ChaosSystem:
    """A server, two gateways and some engines."""

    def __init__(self, server: ValkeyServer, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.backend = OverRedis(server.url, block=2)
        self.clients = [
            GenerationClient(self.backend.gateway(f"g{i}"), QueueLimits(), config=CONFIG)
            for i in range(2)
        ]
        self.engines: dict[FakeEngine, asyncio.Task[None]] = {}
        self.drained: list[asyncio.Task[None]] = []
        self.slots = 8  # of each engine
        self._started = 0

    async def start(self, engines: int) -> None:
        for client in self.clients:
            await client.start()
        for _ in range(engines):
            self.spawn()

    def spawn(self) -> FakeEngine:
        self._started += 1
        queue = self.backend.engine(f"e{self._started}", lease_ms=1000)
        engine = FakeEngine(
            queue, MODEL, slots=self.slots, token_delay=0.01, beat_interval=0.2, seed=self._started
        )
        self.engines[engine] = asyncio.create_task(engine.run())
        return engine

    async def kill(self, engine: FakeEngine) -> None:
        task = self.engines.pop(engine)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.spawn()

    async def fault(self, kind: str, folder: Path) -> None:
        engine = self.rng.choice(list(self.engines))
        match kind:
            case "kill":
                await self.kill(engine)
            case "freeze":
                engine.freeze()
                asyncio.get_running_loop().call_later(1.5, engine.thaw)
            case "drain":
                engine.drain()
                self.drained.append(self.engines.pop(engine))
                self.spawn()
            case "stray":
                self.stray()
            case "restart":
                self.server.restart()
            case "wipe":
                await self.backend.wipe()
            case "rollback":
                self.server.snapshot(folder / "snapshot")
                await asyncio.sleep(0.3)
                self.server.roll_back(folder / "snapshot")

    def stray(self) -> None:
        """Isolates all engines for a while, as if they used another master: gateways get no
        replies, and the engines find no living gateway."""
        for engine in self.engines:
            isolated = IsolatedQueue(engine.queue)
            engine.queue = cast(EngineQueue, isolated)
            asyncio.get_running_loop().call_later(2.0, isolated.reconnect)

    async def answer(self, request: GenerateRequest) -> list[list[int]]:
        """Returns the tokens of each choice, and checks that none is lost or repeated."""
        tokens_by_choice: list[list[int]] = [[] for _ in range(request.sampling.n)]
        generation = await self.rng.choice(self.clients).submit(request)
        async for delta in generation:
            tokens_by_choice[delta.choice] += delta.token_ids
        for choice, tokens in enumerate(tokens_by_choice):
            assert is_one_history(choice, tokens)
            assert len(tokens) == request.sampling.max_tokens
        return tokens_by_choice

    async def is_empty(self) -> bool:
        depth = await self.clients[0].queue.depth(MODEL)
        return depth.waiting == depth.pending == 0 and not any(e.active for e in self.engines)

    async def close(self) -> None:
        for task in self.engines.values():
            task.cancel()
        await asyncio.gather(*self.engines.values(), *self.drained, return_exceptions=True)
        for client in self.clients:
            await client.close()
        await self.backend.close()


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[ChaosSystem]:
    server = ValkeyServer(tmp_path / "data")
    server.start()
    system = ChaosSystem(server, seed=5)
    system.slots = 3  # so that most requests wait in the lists of their tenants
    await system.start(engines=3)
    yield system
    await system.close()
    server.stop()


@pytest.mark.parametrize(
    "faults",
    [
        ("kill", "kill"),
        ("freeze", "kill"),
        ("drain", "freeze"),
        ("restart", "kill"),
        ("wipe", "kill"),
        ("rollback", "kill"),
        ("kill", "stray"),
        ("wipe", "stray"),
    ],
    ids="-".join,
)
async def test_every_stream_is_complete(
    system: ChaosSystem, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    requests = [
        replace(
            make_request(n=1 + number % 2, max_tokens=20 + 4 * number, priority=number % 3 - 1),
            tenant=f"tenant-{number % 4}",
        )
        for number in range(16)
    ]
    answers = [asyncio.create_task(system.answer(request)) for request in requests]
    for kind in faults:
        await asyncio.sleep(0.25)
        await system.fault(kind, tmp_path)
    async with asyncio.timeout(60):
        await asyncio.gather(*answers)
    for engine in system.engines:
        engine.thaw()
    await eventually(system.is_empty)


async def test_a_poison_request_does_not_fail_other_requests(system: ChaosSystem) -> None:
    async def replace_dead_engines() -> None:
        while True:
            done, _ = await asyncio.wait(
                system.engines.values(), return_when=asyncio.FIRST_COMPLETED
            )
            for engine in [e for e, task in system.engines.items() if task in done]:
                assert isinstance(system.engines.pop(engine).exception(), EngineDied)
                system.spawn()

    replacing = asyncio.create_task(replace_dead_engines())
    poison = asyncio.create_task(system.answer(make_request(prompt=(1, POISON_TOKEN))))
    others = [asyncio.create_task(system.answer(make_request(max_tokens=30))) for _ in range(10)]
    async with asyncio.timeout(60):
        await asyncio.gather(*others)
        with pytest.raises(Exception, match="failed on several engines"):
            await poison
    replacing.cancel()
    assert [why for _, why in await system.backend.dead_letters()] == ["poisoned"]
    await eventually(system.is_empty)
