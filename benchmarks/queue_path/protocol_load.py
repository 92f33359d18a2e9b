"""Requests through the queue alone, without HTTP: what one shard costs its Redis.

Each request is admitted, taken, renewed by one beat, answered in frames and finished; many at a
time, as with gateways and engines.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from headrace_common.protocol.base import (
    EngineQueue,
    EngineStatus,
    Lease,
    Outcome,
    Progress,
    QueueLimits,
)
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.sampling.params import SamplingParams
from headrace_common.wire.keys import DEFAULT_SHARD, new_incarnation, new_request_id
from headrace_common.wire.messages import ChoiceState, GenerateRequest, Tokens
from queue_path.sealing import sealer_of

LIMITS = QueueLimits(max_requests=10**6, max_tokens=10**9)
FAR_FUTURE_MS = 4_102_444_800_000
BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load. `frames` and `beats` are the frames and heartbeats of each request."""

    redis_url: str
    model: str
    requests: int
    prompt_tokens: int = 512
    frames: int = 8
    beats: int = 2
    sealing_keys_file: Path | None = None


def work(load: Load) -> None:
    """Runs in a process: carries its requests through the queue."""
    uvloop.run(_work(load))


async def _work(load: Load) -> None:
    config = ConnectionConfig(url=load.redis_url)
    connections = [Connection(config, sealer_of(load.sealing_keys_file)) for _ in range(2)]
    gateway = RedisGatewayQueue(connections[0], new_incarnation("g"))
    engine = RedisEngineQueue(connections[1], new_incarnation("e"), load.model)
    await gateway.start()
    await engine.start()
    for start in range(0, load.requests, BATCH):
        count = min(BATCH, load.requests - start)
        await asyncio.gather(*(gateway.admit(new_request(load), LIMITS) for _ in range(count)))
        left = count
        while left:
            leases = await engine.take(left)
            await carry_out(load, engine, leases)
            left -= len(leases) or left  # another process took them
    for connection in connections:
        await connection.close()


async def carry_out(load: Load, engine: EngineQueue, leases: Sequence[Lease]) -> None:
    """Does everything that an engine does for some requests until their end."""
    if not leases:
        return
    for beat in range(load.beats):
        await engine.beat(
            [_progress(lease, beat) for lease in leases], status_of(engine, load.model)
        )
    for index in range(load.frames):
        replies: dict[str, list[Tokens]] = {}
        for lease in leases:
            replies.setdefault(lease.gateway_id, []).append(_tokens(lease, index))
        await engine.publish(replies)
    outcome = Outcome(choices=(ChoiceState(token_ids=(7,) * load.frames, finish_reason="length"),))
    await asyncio.gather(
        *(engine.finish(each.request.request_id, each.attempt, outcome) for each in leases)
    )


def new_request(load: Load, shard: int = DEFAULT_SHARD) -> GenerateRequest:
    return GenerateRequest(
        request_id=new_request_id(shard),
        model=load.model,
        prompt_token_ids=tuple(range(1, load.prompt_tokens + 1)),
        sampling=SamplingParams(max_tokens=load.frames, seed=1),
        created_ms=0,
        deadline_ms=FAR_FUTURE_MS,
    )


def _progress(lease: Lease, beat: int) -> Progress:
    return Progress(
        request_id=lease.request.request_id,
        attempt=lease.attempt,
        journaled=(4 * max(0, beat - 1),),
        choices=(ChoiceState(token_ids=(7,) * (4 * min(1, beat))),),
    )


def _tokens(lease: Lease, index: int) -> Tokens:
    return Tokens(
        request_id=lease.request.request_id,
        attempt=lease.attempt,
        choice=0,
        index=index,
        token_ids=(7,),
    )


def status_of(engine: EngineQueue, model: str) -> EngineStatus:
    return EngineStatus(
        engine_id=engine.engine_id,
        model=model,
        max_model_len=8192,
        running=BATCH,
        capacity=BATCH,
        kv_utilization=0.0,
        tokens_per_second=0.0,
        last_step_age=0.0,
        draining=False,
        version="load",
    )
