"""Reads how full Redis' memory is, so that stored data leaves room for running requests."""

from collections.abc import Mapping
from typing import Any

from ..accounts import StoreMemory
from .client.connection import Connection

TRIES = 3


class RedisMemory:
    """The memory of the fullest node."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self) -> StoreMemory:
        """The memory as INFO reports it now. Raises BackendUnavailable."""
        client = self._connection.client
        infos = await self._connection.attempt(lambda: client.each("INFO", "memory"), tries=TRIES)
        return max(map(_memory, infos), key=lambda memory: memory.share)


def _memory(info: Mapping[str, Any]) -> StoreMemory:
    return StoreMemory(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0)))
