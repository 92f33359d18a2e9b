"""Stored requests over Redis. Everything here may be repeated."""

import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from .. import keys
from ..errors import MessageError
from .client import Command
from .connection import Connection
from .store import SALT_BYTES, StoredRequest, decode_stored, encode_stored

logger = logging.getLogger(__name__)

TRIES = 3
SALT_LIFETIME_S = 30.0


class RedisRequestStore:
    """See RequestStore."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._salt = secrets.token_bytes(SALT_BYTES)
        self._salt_read = -SALT_LIFETIME_S

    async def salt(self) -> bytes:
        """Read now and then; where Redis has lost it, the one known here is written again."""
        now = time.monotonic()
        if now - self._salt_read >= SALT_LIFETIME_S:
            _, self._salt = await self._commands(
                ("SET", keys.KEY_SALT, self._salt, "NX"), ("GET", keys.KEY_SALT)
            )
            self._salt_read = now
        return self._salt

    async def put(
        self, stored: StoredRequest, replaces: StoredRequest | None = None
    ) -> StoredRequest:
        before = "" if replaces is None else replaces.name
        arguments = [stored.name, encode_stored(stored), stored.expires_ms, before]
        names = [keys.stored_request(stored.request_id)]
        return decode_stored(await self._connection.run("store", names, arguments, tries=TRIES))

    async def get(self, request_id: str) -> StoredRequest | None:
        (data,) = await self._commands(("HGET", keys.stored_request(request_id), "b"))
        try:
            return None if data is None else decode_stored(data)
        except MessageError as error:
            logger.warning(
                "stored request refused", extra={"request_id": request_id, "error": str(error)}
            )
            return None

    async def remove(self, stored: StoredRequest) -> None:
        names = [keys.stored_request(stored.request_id)]
        await self._connection.run("unstore", names, [stored.name], tries=TRIES)

    async def want(self, request_id: str, seconds: float) -> None:
        ms = max(1, int(seconds * 1000))
        await self._commands(("SET", keys.wanted(request_id), b"", "PX", ms))

    async def wanted(self, request_id: str) -> float:
        (left,) = await self._commands(("PTTL", keys.wanted(request_id)))
        return max(0, int(left)) / 1000

    async def attend(self, stored: StoredRequest, gateway_id: str) -> Sequence[str]:
        name = keys.attending(stored.request_id)
        *_, found = await self._commands(
            ("ZADD", name, int(time.time()), gateway_id),
            ("PEXPIREAT", name, stored.expires_ms),
            ("ZRANGE", name, 0, -1),
        )
        return [each.decode() for each in found if each.decode() != gateway_id]

    async def attended(self, stored: StoredRequest, gateway_id: str) -> None:
        await self._commands(("ZREM", keys.attending(stored.request_id), gateway_id))

    async def _commands(self, *commands: Command) -> list[Any]:
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )
