"""Records the gateways that have begun to load a registered model's files and have not ended.

Those that died while loading stay recorded: after MOST of them no further gateway tries.
"""

from ...wire import keys
from .client.connection import Connection

TRIES = 3
MOST = 3
KEPT_MS = 3_600_000


class RedisModelLoads:
    """The loads of one gateway. Raises BackendUnavailable. Every call may be repeated."""

    def __init__(self, connection: Connection, gateway_id: str) -> None:
        self._connection = connection
        self._gateway_id = gateway_id

    async def begin(self, digest: str) -> float | None:
        """Returns None if this gateway may load, or else the seconds since the last of MOST others
        began."""
        arguments = [self._gateway_id, MOST, KEPT_MS]
        age = await self._connection.run("load", _keys(digest), arguments, tries=TRIES)
        return None if age < 0 else age / 1000

    async def end(self, digest: str) -> None:
        """Records that loading ended, with or without success, and that this gateway lives."""
        client, (key,) = self._connection.client, _keys(digest)
        await self._connection.attempt(
            lambda: client.command("ZREM", key, self._gateway_id), tries=TRIES
        )


def _keys(digest: str) -> list[str]:
    return [keys.model_loads(digest)]
