"""Queue backends for tests: the same handles over memory and over a real Valkey."""

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from headrace_common.protocol.accounts import Accounts
from headrace_common.protocol.adapters import AdapterSets
from headrace_common.protocol.base import (
    CanaryPlan,
    EngineQueue,
    EngineStatus,
    GatewayQueue,
    ShardQueue,
)
from headrace_common.protocol.ledger import UsageEntry, read_entry
from headrace_common.protocol.redis.accounts import RedisAccounts
from headrace_common.protocol.redis.adapters import RedisAdapterSets
from headrace_common.protocol.redis.client.client import RedisClient
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.clock import RedisClock
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.redis.sharded_engine import ShardedEngineQueue
from headrace_common.protocol.redis.store import RedisRequestStore
from headrace_common.protocol.redis.variants import RedisCanary
from headrace_common.protocol.registry import ModelRegistry
from headrace_common.protocol.store import RequestStore
from headrace_common.protocol.variants import EngineSide
from headrace_common.sampling.params import SamplingParams
from headrace_common.sealing.aes import AesSealer
from headrace_common.sealing.keyring import Keyring
from headrace_common.sealing.sealer import NULL_SEALER, Sealer
from headrace_common.wire import keys
from headrace_common.wire.messages import GenerateRequest

from .memory_queue.accounts import MemoryAccounts
from .memory_queue.adapters import MemoryAdapterSets
from .memory_queue.backend import MemoryBackend
from .memory_queue.queues import MemoryEngineQueue, MemoryGatewayQueue
from .memory_queue.registry import MemoryModelRegistry
from .memory_queue.store import MemoryRequestStore

MODEL = "org/model-1"


class Backend(Protocol):
    """Makes queues that share one store."""

    shards: int

    def gateway(self, name: str = "g", *, ahead: float = 0.0) -> GatewayQueue:
        """A gateway on a machine whose clock is `ahead` seconds fast."""

    def engine(
        self, name: str = "e", *, lease_ms: int = 60_000, side: EngineSide | None = None
    ) -> EngineQueue: ...

    async def set_canary_percent(self, percent: float | None) -> None: ...

    def registry(self) -> ModelRegistry: ...

    def adapter_sets(self) -> AdapterSets: ...

    def request_store(self) -> RequestStore: ...

    def accounts(self) -> Accounts: ...

    async def wipe(self) -> None: ...

    async def dead_letters(self) -> list[tuple[str, str]]:
        """The request id and the reason of each dead letter."""

    async def ledger(self) -> list[UsageEntry]:
        """The entries of all shards of the model's ledger, the oldest of each shard first."""

    async def close(self) -> None: ...


class InMemory:
    """A Backend in this process. Its engines take from the first `shards` of the model's queue."""

    def __init__(self, shards: int = 1) -> None:
        self.store = MemoryBackend()
        self.store.kept[MODEL] = (shards, math.inf)
        self.shards = shards

    def gateway(self, name: str = "g", *, ahead: float = 0.0) -> GatewayQueue:
        return MemoryGatewayQueue(self.store, name, lambda: self.store.clock() + ahead)

    def engine(
        self, name: str = "e", *, lease_ms: int = 60_000, side: EngineSide | None = None
    ) -> EngineQueue:
        def shard(number: int) -> ShardQueue:
            return MemoryEngineQueue(
                self.store, name, MODEL, shard=number, lease_ms=lease_ms, side=side
            )

        return ShardedEngineQueue(shard, self.shards, reap_every=0.0, share_every=0.0)

    async def set_canary_percent(self, percent: float | None) -> None:
        self.store.shard(MODEL).canary_plan = None if percent is None else CanaryPlan(percent)

    def registry(self) -> ModelRegistry:
        return MemoryModelRegistry(self.store)

    def adapter_sets(self) -> AdapterSets:
        return MemoryAdapterSets(self.store)

    def request_store(self) -> RequestStore:
        return MemoryRequestStore(self.store)

    def accounts(self) -> Accounts:
        return MemoryAccounts(self.store)

    async def wipe(self) -> None:
        self.store.wipe()

    async def dead_letters(self) -> list[tuple[str, str]]:
        shards = [self.store.shard(MODEL, number) for number in range(self.shards)]
        return [(rid, why) for shard in shards for rid, why, _ in shard.dead_letters]

    async def ledger(self) -> list[UsageEntry]:
        shards = [self.store.shard(MODEL, number) for number in range(self.shards)]
        return [entry for shard in shards for entry in shard.ledger]

    async def close(self) -> None:
        """Does nothing: no connection is open."""


class OverRedis:
    """A Backend at a url; each queue has connections of its own, as in its own process. Its engines
    take from the first `shards` of the model's queue. With a `ring` their messages are sealed."""

    def __init__(
        self, url: str, *, block: float = 10.0, shards: int = 1, ring: Keyring | None = None
    ) -> None:
        self.shards = shards
        self.ring = ring
        self.config = ConnectionConfig(url=url, block=block)
        self.keys = keys.ShardKeys(MODEL)
        self.connection = Connection(self.config, self._sealer())
        self._connections = [self.connection]
        self._engines: list[EngineQueue] = []

    @property
    def client(self) -> RedisClient:
        return self.connection.client

    def connect(self, _role: str = "") -> Connection:
        return self._connect(self.config.url)

    def _sealer(self) -> Sealer:
        return NULL_SEALER if self.ring is None else AesSealer(self.ring)

    def _connect(self, url: str) -> Connection:
        connection = Connection(replace(self.config, url=url), self._sealer())
        self._connections.append(connection)
        return connection

    def gateway(self, name: str = "g", *, ahead: float = 0.0) -> GatewayQueue:
        shards = self.shards if self.shards > 1 else None
        connection = self.connect("gateway")
        connection.clock = RedisClock(lambda: time.time() + ahead)
        return RedisGatewayQueue(connection, name, shards=shards, models=[MODEL])

    async def set_canary_percent(self, percent: float | None) -> None:
        plan = None if percent is None else CanaryPlan(percent)
        await RedisCanary(self.connect()).set_plan(MODEL, plan)

    def engine(
        self, name: str = "e", *, lease_ms: int = 60_000, side: EngineSide | None = None
    ) -> EngineQueue:
        connection = self.connect("engine")

        def shard(number: int) -> ShardQueue:
            return RedisEngineQueue(
                connection, name, MODEL, shard=number, lease_ms=lease_ms, side=side
            )

        queue = ShardedEngineQueue(shard, self.shards, reap_every=0.0, share_every=0.0)
        self._engines.append(queue)
        return queue

    def registry(self) -> ModelRegistry:
        return RedisModelRegistry(self.connect())

    def adapter_sets(self) -> AdapterSets:
        return RedisAdapterSets(self.connect())

    def request_store(self) -> RequestStore:
        return RedisRequestStore(self.connect("gateway"))

    def accounts(self) -> Accounts:
        return RedisAccounts(self.connect("gateway"))

    async def wipe(self) -> None:
        await self.client.each("FLUSHALL")

    async def dead_letters(self) -> list[tuple[str, str]]:
        names = [keys.ShardKeys(MODEL, number).dead_letters for number in range(self.shards)]
        found = [
            letter
            for name in names
            for letter in await self.client.command("XRANGE", name, "-", "+")
        ]
        return [(fields[b"r"].decode(), fields[b"why"].decode()) for _, fields in found]

    async def ledger(self) -> list[UsageEntry]:
        names = [keys.ShardKeys(MODEL, number).ledger for number in range(self.shards)]
        return [
            read_entry(MODEL, *entry)
            for name in names
            for entry in await self.client.command("XRANGE", name, "-", "+")
        ]

    async def close(self) -> None:
        for queue in self._engines:
            await queue.close()
        for connection in self._connections:
            await connection.close()


def make_request(
    *,
    request_id: str | None = None,
    prompt: tuple[int, ...] = (1, 2, 3),
    n: int = 1,
    max_tokens: int = 16,
    priority: int = 0,
    seconds: float = 600.0,
) -> GenerateRequest:
    """A request for MODEL that must be answered within `seconds`."""
    now = int(time.time() * 1000)
    return GenerateRequest(
        request_id=request_id or keys.new_request_id(),
        model=MODEL,
        prompt_token_ids=prompt,
        sampling=SamplingParams(n=n, max_tokens=max_tokens, seed=7),
        created_ms=now,
        deadline_ms=now + int(seconds * 1000),
        priority=priority,
    )


def make_status(engine_id: str = "e") -> EngineStatus:
    return EngineStatus(
        engine_id=engine_id,
        model=MODEL,
        max_model_len=4096,
        running=1,
        capacity=16,
        kv_utilization=0.5,
        tokens_per_second=10.0,
        last_step_age=0.0,
        draining=False,
        version="1",
    )


@asynccontextmanager
async def empty_redis(url: str) -> AsyncIterator[OverRedis]:
    """A backend for one test, over a Redis whose data are deleted before."""
    over_redis = OverRedis(url, block=0.2)
    await over_redis.wipe()
    yield over_redis
    await over_redis.close()
