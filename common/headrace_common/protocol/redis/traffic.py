"""Follows a model's queue and records its traffic: times and lengths of requests, never texts."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ...wire.keys import ShardKeys
from .client.client import Command, RedisClient
from .client.connection import Connection
from .stream_reader import entries

TRIES = 3
AT_ONCE = 512  # records that are read in one round trip
ENDED = (b"done", b"failed", b"cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """A request that was answered. `at` is when it was admitted, in Unix seconds of Redis."""

    at: float
    prompt_tokens: int
    output_tokens: int
    tenant: str


class TrafficRecorder:
    """The requests of a model that are admitted while the block runs.

    A request is known once it is next in the queue. One that ends without an answer is left out.
    `began` is when the block began, in Unix seconds of Redis.
    """

    def __init__(self, connection: Connection, model: str, shards: int) -> None:
        self._connection = connection
        self._shards = [ShardKeys(model, number) for number in range(shards)]
        self._open: dict[str, ShardKeys] = {}
        self.began = 0.0
        self._readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        starts = [await self._newest(shard) for shard in self._shards]
        (time,) = await self._pipeline(("TIME",))
        self.began = int(time[0]) + int(time[1]) / 1e6
        self._readers = [
            asyncio.create_task(self._follow(shard, start))
            for shard, start in zip(self._shards, starts, strict=True)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.ignore_new()

    @property
    def running(self) -> int:
        """How many requests have not ended."""
        return len(self._open)

    async def ignore_new(self) -> None:
        """Follows only the requests that are known already."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def ended(self) -> list[RecordedRequest]:
        """The requests that have been answered since the last call. Raises BackendUnavailable."""
        found: list[RecordedRequest] = []
        waiting = list(self._open.items())
        for start in range(0, len(waiting), AT_ONCE):
            part = waiting[start : start + AT_ONCE]
            records = await self._pipeline(
                *(("HMGET", s.record(rid), "st", "t", "pk", "pn", "tn") for rid, s in part)
            )
            for (rid, _), (state, *fields) in zip(part, records, strict=True):
                if state is None or state in ENDED:
                    del self._open[rid]
                if state == b"done":
                    found.append(_recorded(*fields))
        return [request for request in found if request.at >= self.began]

    async def _newest(self, shard: ShardKeys) -> Mapping[str, str]:
        """The last entry of each queue; what is admitted later comes after it."""
        last = await self._pipeline(
            *(("XREVRANGE", name, "+", "-", "COUNT", 1) for name in shard.queues)
        )
        return {
            name: found[0][0].decode() if found else "0-0"
            for name, found in zip(shard.queues, last, strict=True)
        }

    async def _follow(self, shard: ShardKeys, start: Mapping[str, str]) -> None:
        async def names(_client: RedisClient) -> Mapping[str, str]:
            return start

        async def first(_client: RedisClient, name: str, cursor: str) -> str:
            return cursor or start[name]

        async for _, fields in entries(self._connection, names, first):
            self._open[fields.get(b"r", b"").decode()] = shard

    async def _pipeline(self, *commands: Command) -> list[Any]:
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )


def _recorded(at: bytes, prompt: bytes, output: bytes | None, tenant: bytes) -> RecordedRequest:
    return RecordedRequest(
        at=int(at) / 1000,
        prompt_tokens=int(prompt),
        output_tokens=int(output or 0),
        tenant=tenant.decode(),
    )
