"""Checks that a process has the keys of the sealed data in Redis, and reads the shared secret.

One record holds sealed random bytes. A process that cannot open it does not start. The bytes are
the key of the digests that Redis sees (Sealer.digests).
"""

import logging
import secrets
from contextlib import suppress
from typing import Any

from ...errors import BackendUnfit
from ...sealing.sealer import PayloadKind, SealingError, key_id_of
from ...wire import keys
from .client.client import Argument, Command
from .client.connection import Connection

logger = logging.getLogger(__name__)

TRIES = 3
SECRET_BYTES = 32


class SealingCheck:
    """One process's check of the record in one Redis."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._secret: bytes | None = None
        self._record = b""

    async def start(self) -> None:
        """Reads the record, or writes the first one. Raises BackendUnfit, BackendUnavailable."""
        found = await self._get()
        sealer = self._connection.sealer
        if found is not None and not sealer.opens:
            raise BackendUnfit(
                "what lies in this redis is sealed: set sealing_keys_file to the keys of the other "
                f"gateways and engines, or delete {keys.SEALING_CHECK} where nothing sealed is left"
            )
        if found is None and sealer.seals:
            first = self._sealed(secrets.token_bytes(SECRET_BYTES))
            await self._write("SET", keys.SEALING_CHECK, first, "NX")
            found = await self._get()
        if found is not None:
            self._open(found)
            await self.keep()

    async def keep(self) -> None:
        """Writes the record again if the key has changed or Redis has lost it.

        Adopts what another process has written since. Raises BackendUnavailable.
        """
        sealer = self._connection.sealer
        if self._secret is None or not sealer.seals:
            return
        found = await self._get()
        if found is not None and found != self._record:
            self._adopt(found)
        if found is None or key_id_of(found) != sealer.key_id:
            record = self._sealed(self._secret)
            await self._write("SET", keys.SEALING_CHECK, record)
            self._record = record

    def _adopt(self, found: bytes) -> None:
        try:
            self._open(found)
        except BackendUnfit as error:
            logger.error(
                "redis is sealed with a key that this process lacks", extra={"error": str(error)}
            )

    async def _write(self, *command: Argument) -> None:
        """Writes the record, unless the user may not: an engine limited to a model."""
        with suppress(BackendUnfit):
            await self._commands(command)

    def _open(self, found: bytes) -> None:
        sealer = self._connection.sealer
        self._record = found
        try:
            self._secret = sealer.open(PayloadKind.CHECK, (), found)
        except SealingError as error:
            raise BackendUnfit(f"these are not the keys of this redis: {error}") from error
        sealer.share(self._secret)

    def _sealed(self, secret: bytes) -> bytes:
        return self._connection.sealer.seal(PayloadKind.CHECK, (), secret)

    async def _get(self) -> bytes | None:
        (found,) = await self._commands(("GET", keys.SEALING_CHECK))
        return None if found is None else bytes(found)

    async def _commands(self, *commands: Command) -> list[Any]:
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )
