"""Histories of a small system over a real Valkey: fake engines, two gateways' clients, and faults.

Tokens carry a checksum of all tokens before them, so that a single lost, repeated or foreign token
shows. What is random follows from a seed. At a history's end the ledger must have what each client
was given. Run many with `python -m headrace_testing.histories --runs 100`.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from headrace_common.errors import RequestFailed
from headrace_common.protocol.base import EngineQueue, QueueLimits
from headrace_common.protocol.ledger import UsageEntry, read_entry
from headrace_common.wire.messages import ChoiceState, GenerateRequest, Reply
from headrace_gateway.queue_client.client import ClientConfig, Generation, GenerationClient

from .backends import MODEL, OverRedis, make_request
from .fake_engine import FakeEngine, is_one_history
from .valkey import ValkeyServer
from .waiting import eventually

FAULTS = ("kill", "freeze", "drain", "stray", "restart", "wipe", "rollback")
TRIES = 6
# Redis returns the entries and forgets them with everything else.
_WIPE = """
local entries = redis.call('XRANGE', KEYS[1], '-', '+')
redis.call('FLUSHALL')
return entries
"""
CONFIG = ClientConfig(beat_interval=0.3, silence=0.5, recheck=0.5, longest_recheck=1.0)


class IsolatedQueue:
    """An engine's queue that reaches no gateway until `reconnect`."""

    def __init__(self, queue: EngineQueue) -> None:
        self._queue = queue
        self.isolated = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def reconnect(self) -> None:
        self.isolated = False

    async def publish(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        if not self.isolated:
            await self._queue.publish(replies)

    async def gateway_alive(self, gateway_id: str) -> bool:
        return not self.isolated and await self._queue.gateway_alive(gateway_id)

    async def journal(self, request_id: str) -> tuple[ChoiceState, ...] | None:
        """The journal without its last half."""
        states = await self._queue.journal(request_id)
        if states is None or not self.isolated:
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
        self.given: dict[str, tuple[int, int]] = {}  # prompt and output tokens of ended requests
        self._entries: dict[str, list[UsageEntry]] = {}  # as they were read last, by request
        self._running: set[str] = set()
        self._strays: list[IsolatedQueue] = []
        # When Redis lost data, these had ended without being entered; and these ran: such a request
        # is entered only if its gateway queues it again before it ends.
        self._lost: set[str] = set()
        self._at_risk: set[str] = set()

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
                await self._note_reopened()
                self.stray()
            case "restart":
                self.server.restart()
            case "wipe":
                await self._wipe()
            case "rollback":
                self.server.snapshot(folder / "snapshot")
                await asyncio.sleep(0.3)
                await self.read_ledger()
                self.server.roll_back(folder / "snapshot")
                self._note_loss()
                if any(queue.isolated for queue in self._strays):
                    await self._note_reopened()  # before the ledger is read: they may end now
                await self.read_ledger()
                self._note_loss()

    def stray(self) -> None:
        """Isolates all engines for a while, as if they used another master: gateways get no
        replies, and the engines find no living gateway."""
        for engine in self.engines:
            isolated = IsolatedQueue(engine.queue)
            engine.queue = cast(EngineQueue, isolated)
            self._strays.append(isolated)
            asyncio.get_running_loop().call_later(2.0, isolated.reconnect)

    async def answer(self, request: GenerateRequest) -> list[list[int]]:
        """Returns the tokens of each choice, and checks that none is lost or repeated."""
        tokens_by_choice: list[list[int]] = [[] for _ in range(request.sampling.n)]
        generation = await self._submit(request)
        async for delta in generation:
            tokens_by_choice[delta.choice] += delta.token_ids
        for choice, tokens in enumerate(tokens_by_choice):
            assert is_one_history(choice, tokens)
            assert len(tokens) == request.sampling.max_tokens
        self._note(request, sum(map(len, tokens_by_choice)))
        return tokens_by_choice

    async def leave(self, request: GenerateRequest, after: int) -> None:
        """Leaves when `after` tokens have come."""
        generation = await self._submit(request)
        received = 0
        while received < after and not generation.ended:
            received += len((await anext(generation)).token_ids)
        received += _rest(generation)
        self._note(request, received)
        await generation.cancel()

    async def stop(self, request: GenerateRequest, after: int) -> None:
        """Finds a stop string in the token number `after` of each choice."""
        generation = await self._submit(request)
        counts: Counter[int] = Counter()
        async for delta in generation:
            running = counts[delta.choice] < after
            counts[delta.choice] += len(delta.token_ids)
            if running and counts[delta.choice] >= after:
                await generation.stop_choice(delta.choice, after)
        self._note(request, sum(min(count, after) for count in counts.values()))

    async def expire(self, request: GenerateRequest) -> None:
        """Waits until the request's deadline has passed, unless it ends before."""
        generation = await self._submit(request)
        received = 0
        try:
            async for delta in generation:
                received += len(delta.token_ids)
        except RequestFailed:
            pass
        self._note(request, received)

    async def _submit(self, request: GenerateRequest) -> Generation:
        generation = await self.rng.choice(self.clients).submit(request)
        self._running.add(request.request_id)
        return generation

    def _note(self, request: GenerateRequest, output: int) -> None:
        self._running.discard(request.request_id)
        complete = output == request.sampling.n * (request.sampling.max_tokens or 0)
        prompt = len(request.prompt_token_ids) if output or complete else 0
        self.given[request.request_id] = (prompt, output)

    # The ledger

    async def read_ledger(self) -> None:
        self._take(await self.backend.connection.attempt(self.backend.ledger, tries=TRIES))

    def _take(self, entries: Iterable[UsageEntry]) -> None:
        """Notes what was read; a request that ended once more replaces what was read before."""
        found: dict[str, list[UsageEntry]] = {}
        for entry in entries:
            found.setdefault(entry.request_id, []).append(entry)
        self._entries |= found

    async def _wipe(self) -> None:
        command = ("EVAL", _WIPE, 1, self.backend.keys.ledger)
        entries = await self.backend.connection.attempt(
            lambda: self.backend.client.command(*command), tries=TRIES
        )
        pairs = ((name, dict(zip(rest[::2], rest[1::2], strict=True))) for name, rest in entries)
        self._take(read_entry(MODEL, *pair) for pair in pairs)
        self._note_loss()
        # Engines had ended these, of which their clients did not have everything.
        self._lost |= self._running & self._entries.keys()

    async def _note_reopened(self) -> None:
        """Notes the requests whose end Redis has lost: engines that reach no gateway end them once
        more, as if their clients had gone."""
        ids = list(self.given)
        commands = [("HGET", self.backend.keys.record(rid), "st") for rid in ids]
        states = await self.backend.connection.attempt(
            lambda: self.backend.client.pipeline(commands), tries=TRIES
        )
        pairs = zip(ids, states, strict=True)
        self._lost |= {rid for rid, state in pairs if state in (b"queued", b"running")}

    def _note_loss(self) -> None:
        self._lost |= self.wrong_usage().keys()
        self._at_risk |= self._running

    def wrong_usage(self) -> dict[str, str]:
        """What is wrong in the ledger, by request, except for what Redis has lost."""
        found: dict[str, str] = {}
        for rid, given in self.given.items():
            entries = self._entries.get(rid, [])
            entered = (
                sum(entry.prompt_tokens for entry in entries),
                sum(entry.output_tokens for entry in entries),
            )
            if rid in self._lost or (rid in self._at_risk and not entries):
                continue
            parts = [entry.part for entry in entries]
            if entered != given or parts != list(range(max(1, len(parts)))):
                found[rid] = f"{rid}: given {given}, entered {entered}: {entries}"
        return found

    @property
    def lost(self) -> int:
        """The number of requests that are not entered because Redis has lost them."""
        return len(self._lost | (self._at_risk - self._entries.keys()))

    async def ledger_is_right(self) -> bool:
        await self.read_ledger()
        return not self.wrong_usage()

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


def _rest(generation: Generation) -> int:
    """The tokens that have come and were not read."""
    received = 0
    while (delta := generation.take()) is not None:
        received += len(delta.token_ids)
    return received


class History:
    """One history: clients of all kinds, and two or three faults. `problems` says what went
    wrong."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults = [self.rng.choice(FAULTS) for _ in range(self.rng.randint(2, 3))]
        self.checked = self.lost = 0  # requests, and those of them that Redis has lost

    async def run(self, folder: Path) -> list[str]:
        server = ValkeyServer(folder / "data")
        server.start()
        system = ChaosSystem(server, self.seed)
        system.slots = 4
        await system.start(engines=3)
        try:
            return await self._play(system, folder)
        finally:
            await system.close()
            server.stop()

    async def _play(self, system: ChaosSystem, folder: Path) -> list[str]:
        clients = [asyncio.create_task(self._client(system, number)) for number in range(16)]
        for kind in self.faults:
            await asyncio.sleep(self.rng.uniform(0.05, 0.4))
            await system.fault(kind, folder)
        async with asyncio.timeout(90):
            await asyncio.gather(*clients)
        for engine in system.engines:
            engine.thaw()
        await eventually(system.is_empty)
        self.checked, self.lost = len(system.given), system.lost
        with suppress(TimeoutError):
            await eventually(system.ledger_is_right)
        wrong = system.wrong_usage()
        return [f"seed {self.seed}, faults {self.faults}", *wrong.values()] if wrong else []

    def _client(self, system: ChaosSystem, number: int) -> Any:
        n, most = 1 + number % 2, 16 + 3 * number
        request = replace(
            make_request(n=n, max_tokens=most, priority=number % 3 - 1),
            tenant=f"tenant-{number % 4}",
            key=f"key-{number % 5}",
        )
        match self.rng.choice(("answer", "answer", "leave", "stop", "expire")):
            case "leave":
                return system.leave(request, self.rng.randrange(n * most))
            case "stop":
                return system.stop(request, self.rng.randint(1, most))
            case "expire":
                left = int(self.rng.uniform(200, 1500))
                return system.expire(replace(request, deadline_ms=request.created_ms + left))
        return system.answer(request)


async def _run_many(seeds: Sequence[int], at_once: int) -> int:
    """Prints what went wrong; returns the number of histories in which something did."""
    room, failed, requests, lost = asyncio.Semaphore(at_once), 0, 0, 0

    async def one(seed: int) -> None:
        nonlocal failed, requests, lost
        async with room:
            with tempfile.TemporaryDirectory() as folder:
                history = History(seed)
                try:
                    problems = await history.run(Path(folder))
                except TimeoutError:
                    problems = [f"seed {seed}, faults {history.faults}: it does not end"]
        failed, requests = failed + bool(problems), requests + history.checked
        lost += history.lost
        if problems:
            sys.stdout.write("\n".join([*problems, ""]))
            sys.stdout.flush()

    await asyncio.gather(*(one(seed) for seed in seeds))
    sys.stdout.write(
        f"{len(seeds)} histories, {requests} requests, {lost} lost by Redis, {failed} wrong\n"
    )
    return failed


def main() -> int:
    parser = argparse.ArgumentParser("python -m headrace_testing.histories")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds, from that one")
    parser.add_argument("--at-once", type=int, default=2, help="histories that run together")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.runs)
    return 1 if asyncio.run(_run_many(seeds, options.at_once)) else 0


if __name__ == "__main__":
    sys.exit(main())
