"""The data of consoles over Redis: snapshots of engines' batches and decisions of the operator."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from ...errors import MessageError
from ...wire import keys
from ...wire.keys import ShardKeys
from ...wire.messages import Control, Watch
from ..live import (
    DECISION_TTL_MS,
    MAX_DECISION_BYTES,
    MAX_SNAPSHOT_BYTES,
    SNAPSHOT_TTL_MS,
    EngineSight,
    EngineSnapshot,
    ModelSight,
    ScalingDecision,
    decode_decision,
    decode_snapshot,
    encode_decision,
    encode_snapshot,
)
from .client.client import Command
from .client.connection import Connection
from .starts import RedisStarts

logger = logging.getLogger(__name__)

TRIES = 2
WATCH_MS = 3_000
SHOWN_TTL_MS = 10_000
MOST_SHOWN = 64  # tenants whose requests are shared at a time
MOST_WARNINGS = 1000

Send = Callable[[str, str, Control], Awaitable[None]]
Content = TypeVar("Content")


class RedisSnapshotWriter:
    """A SnapshotWriter for one incarnation of an engine."""

    def __init__(self, connection: Connection, engine_id: str, model: str) -> None:
        self._connection = connection
        self._key = ShardKeys(model).snapshot(engine_id)

    async def write(self, snapshot: EngineSnapshot) -> None:
        data = encode_snapshot(replace(snapshot, time=self._connection.clock.now()))
        await self._connection.attempt(
            lambda: self._connection.client.command("SET", self._key, data, "PX", SNAPSHOT_TTL_MS)
        )


class RedisLiveStore:
    """A LiveStore. What engines and the operator wrote is left out if it is unreadable.

    `send` sends a control message to an engine of a model.
    """

    def __init__(self, connection: Connection, send: Send) -> None:
        self._connection = connection
        self._send = send
        self._unreadable: set[str] = set()

    async def watch(self, model: str, engine_ids: Sequence[str]) -> None:
        watch = Watch(duration_ms=WATCH_MS)
        await asyncio.gather(*(self._send(engine_id, model, watch) for engine_id in engine_ids))

    async def read(self, model: str, engine_ids: Sequence[str]) -> ModelSight:
        shard = ShardKeys(model)
        commands: list[Command] = [("GETRANGE", shard.decision, 0, MAX_DECISION_BYTES)]
        for engine_id in engine_ids:
            commands.append(("PTTL", shard.status(engine_id)))
            commands.append(("GETRANGE", shard.snapshot(engine_id), 0, MAX_SNAPSHOT_BYTES))
        client = self._connection.client
        decision, *found = await self._connection.attempt(
            lambda: client.pipeline(commands, raise_on_error=False), tries=TRIES
        )
        now = self._connection.clock.now()
        pairs = zip(engine_ids, found[::2], found[1::2], strict=True)
        return ModelSight(
            engines=tuple(self._sight(name, left, data, now) for name, left, data in pairs),
            decision=self._read(model, decision, decode_decision),
            starts=tuple(await RedisStarts(self._connection, model).read()),
        )

    def _sight(self, engine_id: str, left: object, data: object, now: float) -> EngineSight:
        beat_ago = (keys.LEASE_MS - left) / 1000 if isinstance(left, int) and left > 0 else 0.0
        age, snapshot = max(0.0, beat_ago), self._read(engine_id, data, decode_snapshot)
        if snapshot is not None:
            age = min(age, max(0.0, now - snapshot.time))
        return EngineSight(age=age, snapshot=snapshot)

    def _read(
        self, writer: str, data: object, decode: Callable[[bytes], Content]
    ) -> Content | None:
        """Logs unreadable data once for each writer, although it is read four times a second."""
        try:
            if isinstance(data, ResponseError):  # a model's engines may have changed its type
                raise MessageError(str(data))
            return decode(data) if isinstance(data, bytes) and data else None
        except MessageError as error:
            if writer not in self._unreadable and len(self._unreadable) < MOST_WARNINGS:
                self._unreadable.add(writer)
                extra = {"writer": writer, "error": str(error)}
                logger.warning("not shown in the console: unreadable", extra=extra)
            return None


class RedisDecisionWriter:
    """A DecisionWriter."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def write(self, model: str, decision: ScalingDecision) -> None:
        data, key = encode_decision(decision), ShardKeys(model).decision
        await self._connection.attempt(
            lambda: self._connection.client.command("SET", key, data, "PX", DECISION_TTL_MS)
        )


class RedisSharedRequests:
    """The recent requests that gateways share for consoles. Raises BackendUnavailable."""

    def __init__(self, connection: Connection, gateway_id: str) -> None:
        self._connection = connection
        self.gateway_id = gateway_id

    async def show(self, tenant: str, until: float) -> None:
        """Tells all gateways that a console shows the tenant's requests until then."""
        shown = keys.WATCHED_TENANTS
        await self._pipeline(
            ("ZADD", shown, "GT", int(until * 1000), tenant),
            ("ZREMRANGEBYSCORE", shown, "-inf", self._connection.clock.now_ms()),
            ("PEXPIRE", shown, SHOWN_TTL_MS),
        )

    async def shown(self) -> Sequence[str]:
        """The tenants whose requests a console shows, up to a bound of them."""
        now = self._connection.clock.now_ms()
        (found,) = await self._pipeline(
            ("ZRANGE", keys.WATCHED_TENANTS, now, "+inf", "BYSCORE", "LIMIT", 0, MOST_SHOWN)
        )
        return [tenant.decode() for tenant in found]

    async def write(self, tenant: str, content: bytes) -> None:
        name = keys.shown_requests(tenant)
        await self._pipeline(
            ("HSET", name, self.gateway_id, content), ("PEXPIRE", name, SHOWN_TTL_MS)
        )

    async def read(self, tenant: str) -> Mapping[str, bytes]:
        """The recent requests by gateway."""
        (found,) = await self._pipeline(("HGETALL", keys.shown_requests(tenant)))
        pairs = (
            found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
        )
        return {gateway.decode(): content for gateway, content in pairs}

    async def _pipeline(self, *commands: Command) -> list[Any]:
        client = self._connection.client
        return await self._connection.attempt(lambda: client.pipeline(commands), tries=TRIES)
