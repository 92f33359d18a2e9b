"""Clients' files over Redis, in pieces, until they expire. Every write may be repeated."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import keys
from ..errors import MessageError
from .batches import FileNotKept, StoredFile, decode_record, encode_record, file_not_kept
from .client import Command
from .connection import Connection
from .expiring_index import ExpiringIndex

CHUNK_BYTES = 2**20
TRIES = 3


class RedisFiles:
    """`clock` gives Unix seconds; default: Redis' own."""

    def __init__(self, connection: Connection, clock: Callable[[], float] | None = None) -> None:
        self._connection = connection
        self._clock = clock or connection.clock.now

    async def add(self, file: StoredFile) -> None:
        """Puts a file among its tenant's, before it is written."""
        await self._index(file.tenant).put(file.id, file.expires_at, file.bytes)

    async def write(self, file: StoredFile, chunks: Iterable[tuple[int, bytes]]) -> None:
        """Writes pieces by their numbers; once all are there, `finish` makes it a file."""
        name, expires = keys.stored_file(file.id), file.expires_at * 1000
        for number, chunk in chunks:
            await self._commands(("HSET", name, number, chunk), ("PEXPIREAT", name, expires))

    async def finish(self, file: StoredFile) -> None:
        name = keys.stored_file(file.id)
        await self._commands(
            ("HSET", name, "m", encode_record(file)), ("PEXPIREAT", name, file.expires_at * 1000)
        )

    async def get(self, file_id: str, tenant: str) -> StoredFile:
        """Raises FileNotKept."""
        (data,) = await self._commands(("HGET", keys.stored_file(file_id), "m"))
        file = None if data is None else decode_record(StoredFile, data)
        if file is None or file.tenant != tenant:
            raise file_not_kept(file_id)
        return file

    async def chunk(self, file: StoredFile, number: int) -> bytes:
        """One piece of its content. Raises FileNotKept where it has expired meanwhile."""
        (data,) = await self._commands(("HGET", keys.stored_file(file.id), number))
        if not isinstance(data, bytes):
            raise FileNotKept(f"the file {file.id!r} has expired")
        return data

    async def content(self, file: StoredFile) -> bytes:
        """All of it. Raises FileNotKept."""
        return b"".join([await self.chunk(file, number) for number in range(file.chunks)])

    async def all_of(self, tenant: str) -> list[StoredFile]:
        """A tenant's files, newest first."""
        found: list[StoredFile] = []
        for file_id in await self._index(tenant).numbers():
            try:
                found.append(await self.get(file_id, tenant))
            except (FileNotKept, MessageError):
                continue  # being written, or expired this moment
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    async def delete(self, file: StoredFile) -> None:
        await self._commands(("DEL", keys.stored_file(file.id)))
        await self._index(file.tenant).remove(file.id)

    def _index(self, tenant: str) -> ExpiringIndex:
        return ExpiringIndex(self._commands, keys.tenant_files(tenant), self._clock)

    async def _commands(self, *commands: Command) -> list[Any]:
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )


def pieces(content: bytes) -> Sequence[bytes]:
    """Content as the pieces in which it is kept."""
    return [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
