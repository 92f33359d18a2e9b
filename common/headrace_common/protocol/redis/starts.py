"""The engines that start, over Redis. Their keys are not those of serving engines, so that no
reader takes one that starts for one that serves."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ...errors import MessageError
from ...wire.keys import ShardKeys
from ..live import MAX_START_BYTES, START_TTL_MS, EngineStart, decode_start, encode_start
from .client.client import Command
from .client.connection import Connection

TRIES = 2
MOST_STARTS = 256  # the number of a model's starting engines that are read


class RedisStarts:
    """A model's starting engines. Raises BackendUnavailable."""

    def __init__(self, connection: Connection, model: str) -> None:
        self._connection = connection
        self._keys = ShardKeys(model)

    async def write(self, start: EngineStart) -> None:
        """Replaces what this engine said before. It lives for START_TTL_MS. Raises BackendUnfit if
        the engine's user may not write it."""
        name, members = self._keys.start(start.engine_id), self._keys.starts
        await self._pipeline(
            ("SET", name, encode_start(start), "PX", START_TTL_MS),
            ("SADD", members, start.engine_id),
            ("PEXPIRE", members, START_TTL_MS),
        )

    async def remove(self, engine_id: str) -> None:
        """Removes an engine whose start has ended."""
        await self._pipeline(
            ("DEL", self._keys.start(engine_id)), ("SREM", self._keys.starts, engine_id)
        )

    async def read(self) -> Sequence[EngineStart]:
        """The engines that start now, the first one first. What cannot be read is left out, since
        engines may write anything there."""
        (members,) = await self._pipeline(
            ("SRANDMEMBER", self._keys.starts, MOST_STARTS), raise_on_error=False
        )
        if not members or not isinstance(members, list):
            return ()
        names = [self._keys.start(member.decode(errors="replace")) for member in members]
        values = await self._pipeline(
            *(("GETRANGE", name, 0, MAX_START_BYTES) for name in names), raise_on_error=False
        )
        found: list[EngineStart] = []
        for value in values:
            with suppress(MessageError):
                if isinstance(value, bytes) and value:
                    found.append(decode_start(value))
        return sorted(found, key=lambda start: (-start.seconds, start.engine_id))

    async def _pipeline(self, *commands: Command, raise_on_error: bool = True) -> list[Any]:
        client = self._connection.client
        return await self._connection.attempt(
            lambda: client.pipeline(commands, raise_on_error=raise_on_error), tries=TRIES
        )
