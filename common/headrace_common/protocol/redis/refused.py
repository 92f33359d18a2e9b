"""Refused grammars over Redis, shared by all gateways."""

from contextlib import suppress

from ...errors import BackendUnavailable
from ...pools.limited_pool import KillReason
from ...structured.refused_grammars import TTL_S, RefusedGrammar
from ...wire import keys
from .client.connection import Connection

TRIES = 3


class RedisRefusedGrammars:
    """See RefusedGrammars. `find` raises BackendUnavailable."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _key(self, digest: str) -> str:
        plain = digest.encode()
        own, *_ = self._connection.sealer.digests(plain)
        return keys.refused_grammar(digest if own == plain else own.hex())

    async def find(self, digest: str) -> RefusedGrammar | None:
        client = self._connection.client
        key = self._key(digest)
        reply = await self._connection.attempt(lambda: client.command("GET", key), tries=TRIES)
        if reply is None:
            return None
        reason, attempts = reply.decode().split(":")
        return RefusedGrammar(KillReason(reason), int(attempts))

    async def add(self, digest: str, refused: RefusedGrammar) -> None:
        client = self._connection.client
        key, value = self._key(digest), f"{refused.reason}:{refused.attempts}"
        with suppress(BackendUnavailable):  # without the note, the grammar is only tried once more
            await self._connection.attempt(
                lambda: client.command("SET", key, value, "PX", int(TTL_S * 1000)), tries=TRIES
            )
