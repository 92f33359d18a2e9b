"""How full Redis' memory is: what is stored for later leaves room for what is answered now."""

from collections.abc import Mapping
from typing import Any

from .accounts import Memory
from .connection import Connection

TRIES = 3


class RedisMemory:
    """The memory of the fullest node."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self) -> Memory:
        """What INFO says now. Raises BackendUnavailable."""
        client = self._connection.client
        infos = await self._connection.attempt(lambda: client.each("INFO", "memory"), tries=TRIES)
        return max(map(_memory, infos), key=lambda memory: memory.share)


def _memory(info: Mapping[str, Any]) -> Memory:
    return Memory(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0)))
