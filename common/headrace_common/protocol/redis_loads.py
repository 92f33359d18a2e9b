"""The gateways that have begun to load a registered model's files and have not ended.

Those that died of it stay: after MOST of them no further one tries.
"""

from .. import keys
from .connection import Connection

TRIES = 3
MOST = 3
KEPT_MS = 3_600_000


class RedisModelLoads:
    """The loads of one gateway. Raises BackendUnavailable. Every call may be repeated."""

    def __init__(self, connection: Connection, gateway_id: str) -> None:
        self._connection = connection
        self._gateway_id = gateway_id

    async def begin(self, digest: str) -> float | None:
        """None where this gateway may load; else seconds since the last of MOST others began."""
        arguments = [self._gateway_id, MOST, KEPT_MS]
        age = await self._connection.run("load", _keys(digest), arguments, tries=TRIES)
        return None if age < 0 else age / 1000

    async def end(self, digest: str) -> None:
        """It was loaded, or could not be, and this gateway lives."""
        client, (key,) = self._connection.client, _keys(digest)
        await self._connection.attempt(
            lambda: client.command("ZREM", key, self._gateway_id), tries=TRIES
        )


def _keys(digest: str) -> list[str]:
    return [keys.model_loads(digest)]
