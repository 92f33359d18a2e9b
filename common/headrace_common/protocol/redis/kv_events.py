"""KV events over Redis: a stream for each engine, in the first shard of its model.

A whole filter is written as the only entry of the stream, so a reader that begins anywhere finds
all events after its last one, or a whole filter.
"""

import logging
from collections.abc import Mapping, Sequence

from ...errors import MessageError
from ...sealing.sealer import PayloadKind, opened, sealed
from ...wire import keys
from ...wire.keys import ShardKeys
from ..kv_events import MAX_EVENTS, KVEvent, encode_event
from .client.client import Command
from .client.connection import Connection

logger = logging.getLogger(__name__)

TRIES = 2


class RedisKVEventWriter:
    """A KVEventWriter for one incarnation of an engine."""

    def __init__(self, connection: Connection, engine_id: str, model: str) -> None:
        self._connection = connection
        self._key = ShardKeys(model).kv_events(engine_id)
        self._binding = (model, engine_id)

    async def write(self, event: KVEvent) -> bool:
        plain = encode_event(event)
        data = await sealed(self._connection.sealer, PayloadKind.KV_EVENT, self._binding, plain)
        # Never repeated: readers would take the second one for a gap.
        bound = ("NOMKSTREAM",) if event.whole is None else ("MAXLEN", 1)
        written, _ = await self._connection.attempt(
            lambda: self._connection.client.pipeline(
                [("XADD", self._key, *bound, "*", "e", data), self._renewal]
            )
        )
        return written is not None

    async def renew(self) -> bool:
        (kept,) = await self._connection.attempt(
            lambda: self._connection.client.pipeline([self._renewal]), tries=TRIES
        )
        return bool(kept)

    @property
    def _renewal(self) -> Command:
        return ("PEXPIRE", self._key, keys.KV_EVENTS_TTL_MS)


class RedisKVEventReader:
    """A KVEventReader. What is not a stream, or cannot be opened, is left out."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(
        self, model: str, after: Mapping[str, str]
    ) -> Mapping[str, Sequence[tuple[str, bytes]]]:
        shard = ShardKeys(model)
        commands: list[Command] = [
            ("XRANGE", shard.kv_events(engine), f"({last}" if last else "-", "+")
            + ("COUNT", MAX_EVENTS)
            for engine, last in after.items()
        ]
        replies = await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands, raise_on_error=False), tries=TRIES
        )
        found: dict[str, list[tuple[str, bytes]]] = {}
        for engine, reply in zip(after, replies, strict=True):
            if isinstance(reply, list):
                entries = [(name.decode(), fields.get(b"e", b"")) for name, fields in reply]
                found[engine] = await self._opened((model, engine), entries)
        return found

    async def _opened(
        self, binding: tuple[str, str], entries: Sequence[tuple[str, bytes]]
    ) -> list[tuple[str, bytes]]:
        sealer, found = self._connection.sealer, []
        for name, data in entries:
            try:
                plain = await opened(sealer, PayloadKind.KV_EVENT, binding, data)
            except MessageError as error:
                extra = {"engine_id": binding[1], "error": str(error)}
                logger.warning("KV event cannot be opened, skipped", extra=extra)
                continue
            found.append((name, plain))
        return found
