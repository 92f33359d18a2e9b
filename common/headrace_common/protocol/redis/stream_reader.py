"""Reads streams without end, blocking on a connection of its own; survives any loss of Redis."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError, TryAgainError

from .client.client import RedisClient, backoff
from .client.connection import Connection, translate

logger = logging.getLogger(__name__)

MOST_ENTRIES = 16  # entries of a stream per read, so that a reader that lags does not block others
MOVING_S = 0.05  # seconds between two reads of streams that a cluster moves
Entry = tuple[str, dict[bytes, bytes]]


async def entries(
    connection: Connection,
    names: Callable[[RedisClient], Awaitable[Iterable[str]]],
    first: Callable[[RedisClient, str, str], Awaitable[str]],
) -> AsyncIterator[Entry]:
    """The entries of several streams with one hash tag, each with its stream's name.

    `names` returns the streams' names and is called again whenever an entry has come, so a process
    that adds a stream must write to another one. `first` returns the id to read from, given a new
    connection, a name, and the last id read ("" at first); it is called again after every
    reconnect. A key that is not a stream is deleted.
    """
    stopped: dict[str, str] = {}
    failures = 0
    block = int(connection.config.block * 1000)
    while True:
        client = connection.reader()
        cursors: dict[str, str] = {}
        try:
            while True:
                for name in await names(client):
                    if name not in cursors:
                        cursors[name] = await first(client, name, stopped.get(name, ""))
                reply = await _read(client, cursors, block)
                failures = 0
                for key, batch in reply:
                    name = key.decode()
                    for entry_id, fields in batch:
                        cursors[name] = stopped[name] = entry_id.decode()
                        yield name, fields
        except RedisError as error:
            if not await _wrong_type(client, error, cursors) and translate(error) is None:
                raise
            extra = {"streams": list(cursors), "error": str(error)}
            logger.warning("read of streams interrupted, tried again", extra=extra)
        finally:
            await client.close()
        await backoff(failures)
        failures = min(failures + 1, 10)


async def _read(client: RedisClient, cursors: Mapping[str, str], block: int) -> Sequence[Any]:
    """The new entries of the streams.

    While a cluster moves their slot, it refuses to read several streams together if one of them is
    elsewhere or missing. Then each stream is read alone, without blocking.
    """
    read = ("XREAD", "COUNT", MOST_ENTRIES)
    try:
        reply = await client.command(*read, "BLOCK", block, "STREAMS", *cursors, *cursors.values())
        return reply or ()
    except TryAgainError:
        found: list[Any] = []
        for name, cursor in cursors.items():
            found += await client.command(*read, "STREAMS", name, cursor) or ()
        if not found:
            await asyncio.sleep(MOVING_S)
        return found


async def _wrong_type(client: RedisClient, error: RedisError, names: Iterable[str]) -> bool:
    """Whether the error says that a key is not a stream; deletes such keys.

    Otherwise a user that may write one key could keep a process from reading all its streams.
    """
    if "WRONGTYPE" not in str(error):
        return False
    for name in names:
        try:
            await client.command("XREVRANGE", name, "+", "-", "COUNT", 1)
        except RedisError as found:
            if "WRONGTYPE" in str(found):
                await client.command("DEL", name)
    return True
