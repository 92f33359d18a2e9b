"""Reads the ledgers of usage of all models: by time, or as one of a group of consumers.

A group gets each entry at least once. After a crash it gets those that it has not acknowledged
again, with the same ids.
"""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from ...errors import MessageError
from ...wire import keys
from ...wire.keys import ShardKeys
from ..ledger import UsageEntry, read_entry
from ..shards import SHARD_FIELDS, shards_kept
from .client.client import Command
from .client.connection import Connection

logger = logging.getLogger(__name__)

PAGE = 1000
TRIES = 3
# A group has one consumer, so that whoever continues its work gets what was not acknowledged.
CONSUMER = "1"


@dataclass(frozen=True, slots=True)
class LedgerBatch:
    """Entries that a group was given, and their ids in the streams. `entries` lacks those that
    cannot be read."""

    entries: Sequence[UsageEntry]
    ids: Mapping[str, Sequence[bytes]]

    def __bool__(self) -> bool:
        return any(self.ids.values())


async def registered_models(connection: Connection) -> dict[str, int]:
    """The registered models and the numbers of their shards, for Redis users that may not look
    for keys."""

    async def run() -> dict[str, int]:
        client = connection.client
        known = [await client.command("HGETALL", name) for name in (keys.MODELS, keys.GRANTS)]
        found = {
            name.decode() for entries in known for name in entries if name != keys.MODELS_STORE
        }
        now = connection.clock.now_ms()
        return {
            model: shards_kept(
                await client.command("HMGET", ShardKeys(model).stats, *SHARD_FIELDS), now
            )
            for model in sorted(found)
        }

    return await connection.attempt(run, tries=TRIES)


class LedgerReader:
    """Reads the ledgers of `models`, given with the numbers of their shards.

    Raises BackendUnavailable, and BackendUnfit if the Redis user lacks a permission.
    """

    def __init__(self, connection: Connection, models: Mapping[str, int]) -> None:
        self._connection = connection
        self._models = {
            ShardKeys(model, number).ledger: model
            for model, shards in models.items()
            for number in range(shards)
        }

    async def entries(self, since_ms: int = 0) -> AsyncIterator[UsageEntry]:
        """All entries of requests that ended at that time or later; each ledger in its order."""
        for stream in self._models:
            first = str(since_ms)
            while page := await self._command("XRANGE", stream, first, "+", "COUNT", PAGE):
                for entry in self._read(stream, page):
                    yield entry
                first = "(" + page[-1][0].decode()

    async def join(self, group: str) -> None:
        """Makes the group, from the oldest entries on, where it is missing."""
        for stream in self._models:
            await self._command(
                "XGROUP CREATE", stream, group, "0", "MKSTREAM", allowed="BUSYGROUP"
            )

    async def next(self, group: str, most: int, *, again: bool = False) -> LedgerBatch:
        """At most `most` further entries of each ledger; with `again` those that the group was
        given and has not acknowledged."""
        entries: list[UsageEntry] = []
        ids: dict[str, list[bytes]] = {}
        cursor = "0" if again else ">"
        for stream in self._models:
            reply = await self._read_group(group, stream, most, cursor)
            page = reply[0][1] if reply else []
            entries += self._read(stream, page)
            ids[stream] = [name for name, _ in page]
        return LedgerBatch(entries, ids)

    async def _read_group(self, group: str, stream: str, most: int, cursor: str) -> Any:
        words = ("XREADGROUP", "GROUP", group, CONSUMER, "COUNT", most, "STREAMS", stream, cursor)
        reply = await self._command(*words, allowed="NOGROUP")
        if not isinstance(reply, ResponseError):
            return reply
        await self.join(group)  # an idle ledger expires, and Redis may lose its data
        return None

    async def acknowledge(self, group: str, batch: LedgerBatch) -> None:
        """Notes that the group has done its work for these entries."""
        for stream, ids in batch.ids.items():
            if ids:
                await self._command("XACK", stream, group, *ids)

    def _read(self, stream: str, page: Sequence[tuple[bytes, Any]]) -> list[UsageEntry]:
        found = []
        for name, fields in page:
            try:
                # An entry that was removed before it was acknowledged has no fields.
                if fields:
                    found.append(read_entry(self._models[stream], name, fields))
            except MessageError as error:
                logger.warning(
                    "entry of the ledger unreadable, skipped", extra={"error": str(error)}
                )
        return found

    async def _command(self, *command: Any, allowed: str = "") -> Any:
        """Runs a command; returns an error that begins with `allowed`."""

        async def run() -> Any:
            commands: list[Command] = [command]
            (reply,) = await self._connection.client.pipeline(commands, raise_on_error=False)
            if isinstance(reply, Exception) and not (allowed and str(reply).startswith(allowed)):
                raise reply
            return reply

        return await self._connection.attempt(run, tries=TRIES)
