"""Stored requests over Redis. Every call may be repeated."""

import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ...errors import MessageError
from ...sealing.sealer import PayloadKind, SealingError, opened, sealed
from ...wire import keys
from ..store import SALT_BYTES, StoredRequest, decode_stored, encode_stored
from .client.client import Command
from .client.connection import Connection

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
        """The salt, which is read regularly.

        If Redis has lost it, this process writes its copy again.
        """
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
        binding, sealer = (stored.request_id,), self._connection.sealer
        data = await sealed(sealer, PayloadKind.STORED_REQUEST, binding, encode_stored(stored))
        arguments = [stored.name, data, stored.expires_ms, before]
        names = [keys.stored_request(stored.request_id)]
        now = await self._connection.run("store", names, arguments, tries=TRIES)
        return await self._opened(stored.request_id, now)

    async def get(self, request_id: str) -> StoredRequest | None:
        (data,) = await self._commands(("HGET", keys.stored_request(request_id), "b"))
        try:
            return None if data is None else await self._opened(request_id, data)
        except SealingError:
            raise
        except MessageError as error:
            logger.warning(
                "stored request unreadable, counts as lost",
                extra={"request_id": request_id, "error": str(error)},
            )
            return None

    async def _opened(self, request_id: str, data: bytes) -> StoredRequest:
        sealer = self._connection.sealer
        return decode_stored(await opened(sealer, PayloadKind.STORED_REQUEST, (request_id,), data))

    async def remove(self, stored: StoredRequest) -> None:
        names = [keys.stored_request(stored.request_id)]
        await self._connection.run("unstore", names, [stored.name], tries=TRIES)

    async def set_presence(self, request_id: str, seconds: float) -> None:
        ms = max(1, int(seconds * 1000))
        await self._commands(("SET", keys.client_presence(request_id), b"", "PX", ms))

    async def presence_left(self, request_id: str) -> float:
        (left,) = await self._commands(("PTTL", keys.client_presence(request_id)))
        return max(0, int(left)) / 1000

    async def begin_read(self, stored: StoredRequest, gateway_id: str) -> Sequence[str]:
        name = keys.readers(stored.request_id)
        *_, found = await self._commands(
            ("ZADD", name, int(time.time()), gateway_id),
            ("PEXPIREAT", name, stored.expires_ms),
            ("ZRANGE", name, 0, -1),
        )
        return [each.decode() for each in found if each.decode() != gateway_id]

    async def end_read(self, stored: StoredRequest, gateway_id: str) -> None:
        await self._commands(("ZREM", keys.readers(stored.request_id), gateway_id))

    async def _commands(self, *commands: Command) -> list[Any]:
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )
