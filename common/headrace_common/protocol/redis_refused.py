"""The memory of refused grammars over Redis, which all gateways share."""

from contextlib import suppress

from .. import keys
from ..errors import BackendUnavailable
from ..limited_pool import Excess
from ..refused_grammars import TTL_S, RefusedGrammar
from .connection import Connection

TRIES = 3


class RedisRefusedGrammars:
    """See RefusedGrammars. `find` raises BackendUnavailable."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(self, digest: str) -> RefusedGrammar | None:
        client = self._connection.client
        key = keys.refused_grammar(digest)
        reply = await self._connection.attempt(lambda: client.command("GET", key), tries=TRIES)
        if reply is None:
            return None
        excess, attempts = reply.decode().split(":")
        return RefusedGrammar(Excess(excess), int(attempts))

    async def add(self, digest: str, refused: RefusedGrammar) -> None:
        client = self._connection.client
        key, value = keys.refused_grammar(digest), f"{refused.excess}:{refused.attempts}"
        with suppress(BackendUnavailable):  # full, or away: it is tried once more, no worse
            await self._connection.attempt(
                lambda: client.command("SET", key, value, "PX", int(TTL_S * 1000)), tries=TRIES
            )
