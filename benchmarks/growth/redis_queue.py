"""Curves of the queue: what Redis pays and keeps, over waiting requests, shards and engines."""

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis as redis_client
import uvloop

from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.wire.keys import new_incarnation
from path import body, token_of_one_letter
from queue_path.emitter import Emission, Emitted, emit
from queue_path.processes import MODEL, Server, gateway, valkey
from queue_path.protocol_load import Load, carry_out, new_request
from queue_path.streams import read_streams
from queue_shards import cluster, measure_idle_engine, measure_load

from .curve import Curve, up_to

LIMITS = QueueLimits(max_requests=2 * 10**6, max_tokens=10**10)
AT_ONCE = 64
TURNS = 1024  # requests that are measured while others wait
PROMPT_TOKENS = 128
ENGINE_PROCESSES = 2
TOKENS = 24  # of each engine's stream
HOP_LIMIT_MS = 10.0


def waiting(most: int, _seconds: float) -> Iterator[Curve]:
    """CPU of Redis for a request that comes and goes, and Redis' memory, over waiting requests."""
    cpu = Curve("queue, by waiting requests", "waiting requests", "Redis, a request", "µs")
    asked = Curve("depth, by waiting requests", "waiting requests", "Redis, a look", "µs")
    kept = Curve("queue's memory", "waiting requests", "Redis' memory", "MB")
    with tempfile.TemporaryDirectory() as folder, valkey(Path(folder)) as redis:
        uvloop.run(
            _waiting(redis, up_to(most, [1, 1000, 10_000, 100_000, 10**6]), cpu, asked, kept)
        )
    yield from (cpu, asked, kept)


async def _waiting(redis: Server, sizes: list[int], cpu: Curve, asked: Curve, kept: Curve) -> None:
    load = Load(redis_url=redis.url, model=MODEL, requests=0, prompt_tokens=PROMPT_TOKENS)
    connections = [Connection(ConnectionConfig(url=redis.url)) for _ in range(2)]
    queue = RedisGatewayQueue(connections[0], new_incarnation("g"))
    engine = RedisEngineQueue(connections[1], new_incarnation("e"), MODEL)
    await queue.start()
    await engine.start()

    async def admit(count: int) -> None:
        for begin in range(0, count, AT_ONCE):
            new = (new_request(load) for _ in range(min(AT_ONCE, count - begin)))
            await asyncio.gather(*(queue.admit(request, LIMITS) for request in new))

    there = 0
    for size in sizes:
        await admit(size - there)
        there = size
        begun = redis.cpu_seconds()
        for _ in range(TURNS // AT_ONCE):
            await admit(AT_ONCE)
            await carry_out(load, engine, await engine.take(AT_ONCE))
        turned = redis.cpu_seconds()
        for _ in range(TURNS):
            await queue.depth(MODEL)
        looked = redis.cpu_seconds()
        cpu.add(size, 1e6 * (turned - begun) / TURNS)
        asked.add(size, 1e6 * (looked - turned) / TURNS)
        kept.add(size, used_memory(redis) / 1e6)
    for connection in connections:
        await connection.close()


def used_memory(redis: Server) -> int:
    with redis_client.Redis.from_url(redis.url) as client:
        return int(client.info("memory")["used_memory"])


def engines(most: int, seconds: float) -> Iterator[Curve]:
    """The hop of tokens and the cost of Redis, over engines that only emit."""
    hop = Curve("hop, by engines", "engines", "p99 of a token's hop", "ms", HOP_LIMIT_MS)
    cpu = Curve("Redis, by engines", "engines", "a second of all", "ms")
    kept = Curve("engines' memory in Redis", "engines", "Redis' memory", "MB")
    for count in up_to(most, [1, 10, 100, 1000]):
        with tempfile.TemporaryDirectory() as folder, valkey(Path(folder)) as redis:
            figures = _emitting(redis, Path(folder), count, seconds / 5)
        for curve, value in zip((hop, cpu, kept), figures, strict=True):
            curve.add(count, value)
    yield from (hop, cpu, kept)


def _emitting(redis: Server, folder: Path, count: int, interval: float) -> tuple[float, ...]:
    """The p99 of hops in ms, CPU ms of Redis a second, and what it keeps for the engines in MB;
    each of `count` engines emits a token every `interval` seconds."""
    before = used_memory(redis)
    emission = Emission(
        redis_url=redis.url, model=MODEL, token=token_of_one_letter(), interval=interval, slots=1
    )
    context = multiprocessing.get_context("spawn")
    pipes = []
    processes = min(ENGINE_PROCESSES, count)
    for number in range(processes):
        ours, theirs = context.Pipe()
        own = count // processes + (number < count % processes)
        context.Process(target=emit, args=(emission, theirs, own), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    with gateway(redis.url, folder) as running:
        begun, cpu = time.monotonic(), redis.cpu_seconds()
        bodies = [body("completions", TOKENS)] * count
        streams = read_streams(running.url, "/v1/completions", bodies, count)
        used = (redis.cpu_seconds() - cpu) / (time.monotonic() - begun)
    kept = used_memory(redis) - before
    emitted: list[Emitted] = []
    for pipe in pipes:
        pipe.send("stop")
        emitted += pipe.recv()
    made = {rid: (one.steps, first) for one in emitted for rid, first in one.first.items()}
    hops = []
    for stream in streams:
        if not stream.complete or len(stream.arrivals) != TOKENS:
            raise RuntimeError(
                f"{stream.status}: a stream ended after {len(stream.arrivals)} of {TOKENS} tokens"
            )
        steps, first = made[stream.request_id]
        # Without the first ones, at which other requests still come.
        hops += [
            stream.arrivals[index] - steps[first + index]
            for index in range(TOKENS * 2 // 3, TOKENS)
        ]
    return 1e-6 * statistics.quantiles(hops, n=100)[98], 1e3 * used, kept / 1e6


def shards(most: int, seconds: float) -> Iterator[Curve]:
    """The cost of a request and of an engine without one, over the shards of a model's queue on a
    cluster of three masters."""
    request = Curve("cluster, by shards", "shards", "all masters, a request", "µs")
    idle = Curve("idle engine, by shards", "shards", "commands a second", "1/s")
    for count in up_to(most, [1, 2, 4, 8, 16]):
        options = argparse.Namespace(requests=min(most, 64) * 48, processes=2, pairs=4)
        with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as nodes:
            loaded = measure_load(nodes, count, options)
            waits = measure_idle_engine(nodes, count, seconds)
        request.add(count, loaded["redis_us_per_request"])
        idle.add(count, waits["commands_per_second"])
    yield from (request, idle)
