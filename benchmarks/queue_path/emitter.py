"""An engine without a model: it keeps the whole queue protocol and emits tokens at a set speed.

It runs in its own process, so that its work does not count in other processes' figures.
"""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import uvloop

from headrace_common.protocol.base import EngineStatus, Lease, Outcome, Progress
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.wire.keys import new_incarnation
from headrace_common.wire.messages import ChoiceState, Reply, Tokens
from queue_path.sealing import sealer_of

BEAT_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """`interval` seconds between steps (0: as fast as it can), `slots` requests at once. Nothing is
    emitted before `together` requests have arrived; every token is `token`.
    """

    redis_url: str
    model: str
    token: int
    interval: float
    together: int = 1
    slots: int = 1024
    shard: int = 0
    sealing_keys_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Emitted:
    """The time at which the write of each step began (monotonic ns), and each request's first
    step."""

    steps: list[int]
    first: dict[str, int]


class Emitter:
    def __init__(self, emission: Emission) -> None:
        self._emission = emission
        config = ConnectionConfig(url=emission.redis_url)
        connection = Connection(config, sealer_of(emission.sealing_keys_file))
        self._queue = RedisEngineQueue(
            connection, new_incarnation("emitter"), emission.model, shard=emission.shard
        )
        self._running: dict[str, Lease] = {}
        self._made: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._steps: list[int] = []
        self._first: dict[str, int] = {}
        self._endings: set[asyncio.Task[bool]] = set()

    def emitted(self) -> Emitted:
        return Emitted(self._steps, self._first)

    async def start(self) -> None:
        await self._queue.start()
        await self._beat()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._intake())
            group.create_task(self._emit())
            group.create_task(self._beats())

    async def leave(self) -> None:
        """Publishes that it takes no more requests, as engines do at their end, so that none is
        placed with it."""
        await self._queue.beat((), self._status(draining=True))

    async def _intake(self) -> None:
        while True:
            leases = await self._queue.take(self._emission.slots - len(self._running))
            for lease in leases:
                self._running[lease.request.request_id] = lease
                self._made[lease.request.request_id] = 0
            if leases:
                await self._beat([lease.request.request_id for lease in leases])
                self._changed.set()
            else:
                await self._queue.wait()

    async def _emit(self) -> None:
        due, together = time.monotonic(), False
        while True:
            together = together and bool(self._running)
            while not together:
                self._changed.clear()
                await self._changed.wait()
                due = time.monotonic()
                together = len(self._running) >= self._emission.together
            replies = self._step()
            self._steps.append(time.monotonic_ns())
            await self._queue.publish(replies)
            due += self._emission.interval
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)

    def _step(self) -> dict[str, list[Reply]]:
        replies: dict[str, list[Reply]] = defaultdict(list)
        for rid, lease in list(self._running.items()):
            index = self._made[rid]
            self._first.setdefault(rid, len(self._steps))
            self._made[rid] += 1
            last = self._made[rid] == lease.request.sampling.max_tokens
            replies[lease.gateway_id].append(
                Tokens(
                    request_id=rid,
                    attempt=lease.attempt,
                    choice=0,
                    index=index,
                    token_ids=(self._emission.token,),
                    finish_reason="length" if last else None,
                )
            )
            if last:
                self._end(rid, lease)
        return replies

    def _end(self, rid: str, lease: Lease) -> None:
        del self._running[rid]
        made = self._made.pop(rid)
        state = ChoiceState(token_ids=(self._emission.token,) * made, finish_reason="length")
        ending = asyncio.create_task(
            self._queue.finish(rid, lease.attempt, Outcome(choices=(state,)))
        )
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self._beat(list(self._running))

    async def _beat(self, request_ids: list[str] | None = None) -> None:
        progress = [
            Progress(
                request_id=rid,
                attempt=self._running[rid].attempt,
                journaled=(0,),
                choices=(ChoiceState(token_ids=(self._emission.token,) * self._made[rid]),),
            )
            for rid in request_ids or ()
        ]
        await self._queue.beat(progress, self._status())

    def _status(self, *, draining: bool = False) -> EngineStatus:
        return EngineStatus(
            engine_id=self._queue.engine_id,
            model=self._emission.model,
            max_model_len=8192,
            running=len(self._running),
            capacity=self._emission.slots,
            kv_utilization=0.0,
            tokens_per_second=0.0,
            last_step_age=0.0,
            draining=draining,
            version="emitter",
        )


def emit(emission: Emission, pipe: Pipe, engines: int = 1) -> None:
    """Runs in the process: as many engines serve until anything arrives in the pipe, then it
    reports what each emitted."""
    uvloop.run(_serve(emission, pipe, engines))


async def _serve(emission: Emission, pipe: Pipe, engines: int) -> None:
    emitters = [Emitter(emission) for _ in range(engines)]
    await asyncio.gather(*(emitter.start() for emitter in emitters))
    running = [asyncio.create_task(emitter.run()) for emitter in emitters]
    stopped = asyncio.create_task(asyncio.to_thread(pipe.recv))
    pipe.send("ready")
    done, _ = await asyncio.wait({stopped, *running}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await asyncio.gather(*(emitter.leave() for emitter in emitters))
    pipe.send([emitter.emitted() for emitter in emitters])
