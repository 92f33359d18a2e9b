"""Batches over Redis: the request, its progress, the results of its lines, its leader's lease.

The first result written for a line counts; every call may be repeated. A lease keeps other gateways
from leading the same batch. Two leaders at once would do work twice, but change nothing else.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...errors import MessageError
from ...sealing.sealer import Binding, PayloadKind, opened, sealed
from ...wire import keys
from ..batches import (
    Batch,
    BatchNotStored,
    BatchProgress,
    BatchRequest,
    BatchResult,
    TokenUsage,
    batch_not_stored,
    decode_done,
    decode_record,
    decode_usage,
    encode_done,
    encode_record,
    encode_usage,
)
from .client.client import Command
from .client.connection import Connection
from .expiring_index import ExpiringIndex

LEASE_S = 15.0
TRIES = 3
FIELDS = ("m", "p", "c")  # of a batch's hash
NOTHING_USED = TokenUsage()


class RedisBatches:
    """Batches over Redis. `clock` returns Unix seconds; the default is Redis' clock."""

    def __init__(self, connection: Connection, clock: Callable[[], float] | None = None) -> None:
        self._connection = connection
        self._clock = clock or connection.clock.now
        self._sealer = connection.sealer

    async def create(self, request: BatchRequest) -> Batch:
        """Stores a batch and marks it as waiting for a leader."""
        name, progress = keys.batch(request.id), BatchProgress()
        asked = self._sealer.seal(PayloadKind.BATCH, (request.id,), encode_record(request))
        await self._commands(
            ("HSET", name, "m", asked, "p", self._sealed(request.id, progress)),
            ("PEXPIREAT", name, request.kept_until * 1000),
        )
        for index in (keys.tenant_batches(request.tenant), keys.OPEN_BATCHES):
            await self._index(index).put(request.id, request.kept_until)
        return Batch(request=request, progress=progress)

    async def get(self, batch_id: str) -> Batch:
        """A batch. Raises BatchNotStored."""
        (raw,) = await self._commands(("HMGET", keys.batch(batch_id), *FIELDS))
        if raw[0] is None:
            raise batch_not_stored(batch_id)
        return self._batch(batch_id, *raw)

    async def all_of(self, tenant: str) -> list[Batch]:
        """A tenant's batches, newest first."""
        found: list[Batch] = []
        for batch_id in await self._index(keys.tenant_batches(tenant)).numbers():
            try:
                found.append(await self.get(batch_id))
            except (BatchNotStored, MessageError):
                continue
        order = [(batch.request.created_at, batch.request.id, batch) for batch in found]
        return [batch for *_, batch in sorted(order, key=lambda item: item[:2], reverse=True)]

    async def count_open(self, tenant: str) -> int:
        """The number of a tenant's batches that have not ended."""
        return sum(not batch.progress.status.final for batch in await self.all_of(tenant))

    async def cancel(self, batch: Batch) -> None:
        """Asks the batch's leader to end it."""
        name = keys.batch(batch.request.id)
        await self._commands(("HSETNX", name, "c", int(self._clock())))

    # For its leader

    async def open(self) -> Sequence[str]:
        """The ids of batches that have not ended, of all tenants."""
        return list(await self._index(keys.OPEN_BATCHES).numbers())

    async def all_open(self) -> Sequence[Batch]:
        """The batches that have not ended, of all tenants."""
        ids = await self.open()
        asked = [("HMGET", keys.batch(batch_id), *FIELDS) for batch_id in ids]
        found = zip(ids, await self._commands(*asked) if asked else [], strict=True)
        batches = [self._batch(batch_id, *raw) for batch_id, raw in found if raw[0] is not None]
        return [batch for batch in batches if not batch.progress.status.final]

    async def lead(self, batch_id: str, leader: str) -> bool:
        """Takes a free lease or renews this leader's; False if another leader has it."""
        name, ms = keys.batch_lease(batch_id), int(LEASE_S * 1000)
        taken, owner = await self._commands(("SET", name, leader, "NX", "PX", ms), ("GET", name))
        if taken:
            return True
        if owner is None or owner.decode() != leader:
            return False
        await self._commands(("PEXPIRE", name, ms))
        return True

    async def leave(self, batch_id: str, leader: str) -> None:
        """Releases the lease, so that another leader can continue immediately."""
        name = keys.batch_lease(batch_id)
        (owner,) = await self._commands(("GET", name))
        if owner is not None and owner.decode() == leader:
            await self._commands(("DEL", name))

    async def progress(self, batch: Batch, progress: BatchProgress) -> None:
        batch_id = batch.request.id
        await self._commands(("HSET", keys.batch(batch_id), "p", self._sealed(batch_id, progress)))

    async def close(self, batch: Batch) -> bool:
        """Closes a batch whose results are in files: deletes the results and its need of a leader.

        Returns whether it was open.
        """
        batch_id = batch.request.id
        was_open = await self._index(keys.OPEN_BATCHES).remove(batch_id)
        await self._commands(
            ("DEL", keys.batch_results(batch_id)),
            ("DEL", keys.batch_marks(batch_id)),
            ("DEL", keys.batch_usage(batch_id)),
            ("DEL", keys.batch_starts(batch_id)),
        )
        return was_open

    async def start(self, batch: Batch, line: int, leader: str) -> None:
        """Notes that a leader starts a line, before it does anything for it."""
        name = keys.batch_starts(batch.request.id)
        await self._commands(
            ("ZADD", name, int(self._clock()), _start(line, leader)),
            ("PEXPIREAT", name, batch.request.kept_until * 1000),
        )

    async def unstart(self, batch: Batch, lines: Iterable[int], leaders: Iterable[str]) -> None:
        """Removes the notes that these leaders have started these lines."""
        names = list(leaders)
        starts = [_start(line, leader) for line in lines for leader in names]
        if starts:
            await self._commands(("ZREM", keys.batch_starts(batch.request.id), *starts))

    async def starters(self, batch: Batch) -> Mapping[int, frozenset[str]]:
        """The leaders that have started a line and neither ended it nor left it to others."""
        (raw,) = await self._commands(("ZRANGE", keys.batch_starts(batch.request.id), 0, -1))
        found: defaultdict[int, set[str]] = defaultdict(set)
        for start in raw:
            line, _, leader = start.decode().partition(":")
            found[int(line)].add(leader)
        return {line: frozenset(leaders) for line, leaders in found.items()}

    async def keep(
        self,
        batch: Batch,
        line: int,
        result: bytes,
        *,
        answered: bool,
        usage: TokenUsage = NOTHING_USED,
        starters: Iterable[str] = (),
    ) -> bool:
        """Stores a line's result, unless it has one, and removes its notes of `starters`.

        Returns whether the line had no result.
        """
        batch_id, until = batch.request.id, batch.request.kept_until * 1000
        results, marks = keys.batch_results(batch_id), keys.batch_marks(batch_id)
        used = keys.batch_usage(batch_id)
        mark = encode_done(BatchResult(answered, len(result)))
        data = await sealed(self._sealer, PayloadKind.BATCH_RESULT, _binding(batch, line), result)
        _, first, *_ = await self._commands(
            ("HSETNX", results, line, data),
            ("HSETNX", marks, line, mark),
            ("HSETNX", used, line, encode_usage(usage)),
            ("PEXPIREAT", results, until),
            ("PEXPIREAT", marks, until),
            ("PEXPIREAT", used, until),
        )
        await self.unstart(batch, [line], starters)
        return bool(first)

    async def used(self, batch: Batch) -> Mapping[int, TokenUsage]:
        """The tokens used by lines with a result, as far as stored."""
        (raw,) = await self._commands(("HGETALL", keys.batch_usage(batch.request.id)))
        return {int(line): decode_usage(data) for line, data in raw.items()}

    async def done(self, batch: Batch) -> Mapping[int, BatchResult]:
        """The numbers of the lines that have a result."""
        (raw,) = await self._commands(("HGETALL", keys.batch_marks(batch.request.id)))
        return {int(line): decode_done(mark) for line, mark in raw.items()}

    async def results(self, batch: Batch, lines: Sequence[int]) -> list[bytes]:
        """The results of those lines that have one."""
        name = keys.batch_results(batch.request.id)
        (found,) = await self._commands(("HMGET", name, *lines))
        return [
            await opened(self._sealer, PayloadKind.BATCH_RESULT, _binding(batch, line), result)
            for line, result in zip(lines, found, strict=True)
            if result is not None
        ]

    def _sealed(self, batch_id: str, progress: BatchProgress) -> bytes:
        return self._sealer.seal(PayloadKind.BATCH_PROGRESS, (batch_id,), encode_record(progress))

    def _batch(
        self, batch_id: str, asked: bytes, progress: bytes | None, cancelled: bytes | None
    ) -> Batch:
        """Raises MessageError."""
        binding, unseal = (batch_id,), self._sealer.open
        request = decode_record(BatchRequest, unseal(PayloadKind.BATCH, binding, asked))
        if progress is None:
            return Batch(request=request, cancelling_at=_time(cancelled))
        known = unseal(PayloadKind.BATCH_PROGRESS, binding, progress)
        return Batch(
            request=request,
            progress=decode_record(BatchProgress, known),
            cancelling_at=_time(cancelled),
        )

    def _index(self, key: str) -> ExpiringIndex:
        return ExpiringIndex(self._commands, key, self._clock)

    async def _commands(self, *commands: Command) -> list[Any]:
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )


def _start(line: int, leader: str) -> str:
    return f"{line}:{leader}"


def _time(cancelled: bytes | None) -> int | None:
    return None if cancelled is None else int(cancelled)


def _binding(batch: Batch, line: int) -> Binding:
    return batch.request.id, batch.request.tenant, line
