"""Engines that write frames and gateways that read them, without requests, HTTP and models.

All engines are in one process and all gateways in another, so that they cost little beside Redis.
Both use the queue's own code. A frame's tokens are the time at which it was written.
"""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

import redis as redis_client
import uvloop

from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.wire.keys import new_incarnation, new_request_id
from headrace_common.wire.messages import Tokens
from queue_path.processes import MODEL, Server

WARM_UP = 1.0  # seconds
CLOCK = 2**31  # microseconds after which a token's time begins again


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Each engine has `streams` streams, spread over all gateways, and makes `steps` steps a
    second (0: as many as it can), in each a token for each stream."""

    engines: int
    gateways: int
    streams: int = 64
    steps: float = 30.0

    @property
    def frames(self) -> float:
        """Frames a second."""
        return self.engines * min(self.gateways, self.streams) * self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What a second of traffic was and cost. CPU in ms; `reads` are the replies to gateways;
    `hop_ms` are the median and the p99 from an engine's write to a gateway's decoded frame."""

    frames: float
    reads: float
    redis_ms: float
    engines_ms: float
    gateways_ms: float
    hop_ms: tuple[float, float]


class _Counts:
    """What the gateways have read: the hops of all frames, in microseconds."""

    def __init__(self) -> None:
        self.hops: list[int] = []

    def summary(self) -> tuple[int, float, float]:
        """The number of frames, and the median and p99 of their hops in ms."""
        marks = statistics.quantiles(self.hops, n=100) if len(self.hops) > 1 else [0.0] * 99
        return len(self.hops), marks[49] / 1e3, marks[98] / 1e3


def measure(redis: Server, traffic: Traffic, seconds: float) -> Flow:
    """Runs traffic through Redis for some seconds."""
    names = [new_incarnation("g") for _ in range(traffic.gateways)]
    gateways = _Process(_read, redis.url, names)
    engines = _Process(_write, redis.url, names, traffic)
    try:
        time.sleep(WARM_UP)
        gateways.ask_counts()
        begun = time.monotonic()
        before = [process.cpu_seconds() for process in (redis, engines.server, gateways.server)]
        reads = _calls(redis, "xread")
        time.sleep(seconds)
        took = time.monotonic() - begun
        after = [process.cpu_seconds() for process in (redis, engines.server, gateways.server)]
        reads = _calls(redis, "xread") - reads
        frames, *hops = gateways.ask_counts()
    finally:
        engines.end()
        gateways.end()
    used = [1e3 * (end - start) / took for start, end in zip(before, after, strict=True)]
    return Flow(
        frames=frames / took,
        reads=reads / took,
        redis_ms=used[0],
        engines_ms=used[1],
        gateways_ms=used[2],
        hop_ms=(hops[0], hops[1]),
    )


def _calls(redis: Server, command: str) -> int:
    with redis_client.Redis.from_url(redis.url) as client:
        return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


class _Process:
    """A process that runs `work(pipe, ...)`."""

    def __init__(self, work: Callable[..., Coroutine[Any, Any, None]], *given: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(work, theirs, *given), daemon=True)
        self._process.start()
        theirs.close()  # a process that dies is noticed by the end of its pipe
        assert self._pipe.recv() == "ready"
        assert self._process.pid is not None
        self.server = Server(self._process.pid, "")

    def ask_counts(self) -> tuple[int, float, float]:
        """What gateways have read since the last time."""
        self._pipe.send("counts")
        counts: tuple[int, float, float] = self._pipe.recv()
        return counts

    def end(self) -> None:
        self._process.terminate()
        self._process.join()


def _run(work: Callable[..., Coroutine[Any, Any, None]], pipe: Pipe, *given: Any) -> None:
    uvloop.run(work(pipe, *given))


async def _read(pipe: Pipe, url: str, names: Sequence[str]) -> None:
    counts = _Counts()
    queues = [
        RedisGatewayQueue(Connection(ConnectionConfig(url=url)), name, models=[MODEL])
        for name in names
    ]

    def answer() -> None:
        nonlocal counts
        pipe.recv()
        pipe.send(counts.summary())
        counts = _Counts()

    async def frames(queue: RedisGatewayQueue) -> None:
        async for frame in queue.frames():
            written = frame.replies[0].token_ids[0]  # type: ignore[union-attr]
            counts.hops.append((_microseconds() - written) % CLOCK)

    asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
    async with asyncio.TaskGroup() as group:
        for queue in queues:
            await queue.start()
            group.create_task(frames(queue))
        pipe.send("ready")


async def _write(pipe: Pipe, url: str, gateways: Sequence[str], traffic: Traffic) -> None:
    queues = [
        RedisEngineQueue(Connection(ConnectionConfig(url=url)), new_incarnation("e"), MODEL)
        for _ in range(traffic.engines)
    ]
    for queue in queues:
        await queue.start()
    pipe.send("ready")
    interval = 1 / traffic.steps if traffic.steps else 0.0
    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number, queue in enumerate(queues):
            first = begun + interval * number / traffic.engines
            group.create_task(_steps(queue, gateways, traffic.streams, first, interval))


async def _steps(
    queue: RedisEngineQueue, gateways: Sequence[str], streams: int, due: float, interval: float
) -> None:
    ids = [(new_request_id(), gateways[number % len(gateways)]) for number in range(streams)]
    index = 0
    while True:
        if (left := due - time.monotonic()) > 0:
            await asyncio.sleep(left)
        now = _microseconds()
        replies: dict[str, list[Tokens]] = {}
        for rid, gateway in ids:
            replies.setdefault(gateway, []).append(Tokens(rid, 1, 0, index, (now,)))
        await queue.publish(replies)
        index += 1
        due += interval


def _microseconds() -> int:
    return time.monotonic_ns() // 1000 % CLOCK
