"""Clients' files over Redis, in pieces, until they expire. Every write may be repeated."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...errors import MessageError
from ...sealing.sealer import PayloadKind, opened, sealed
from ...wire import keys
from ..batches import FileNotStored, StoredFile, decode_record, encode_record, file_not_stored
from .client.client import Command
from .client.connection import Connection
from .expiring_index import ExpiringIndex

CHUNK_BYTES = 2**20
TRIES = 3


class RedisFiles:
    """Files over Redis. `clock` returns Unix seconds; the default is Redis' clock."""

    def __init__(self, connection: Connection, clock: Callable[[], float] | None = None) -> None:
        self._connection = connection
        self._clock = clock or connection.clock.now
        self._sealer = connection.sealer

    async def add(self, file: StoredFile) -> None:
        """Adds a file to its tenant's list, before its content is written."""
        await self._index(file.tenant).put(file.id, file.expires_at, file.bytes)

    async def write(self, file: StoredFile, chunks: Iterable[tuple[int, bytes]]) -> None:
        """Writes numbered pieces; once all are written, `finish` completes the file."""
        name, expires = keys.stored_file(file.id), file.expires_at * 1000
        for number, chunk in chunks:
            binding = (file.id, file.tenant, number)
            data = await sealed(self._sealer, PayloadKind.FILE_PIECE, binding, chunk)
            await self._commands(("HSET", name, number, data), ("PEXPIREAT", name, expires))

    async def finish(self, file: StoredFile) -> None:
        name = keys.stored_file(file.id)
        data = self._sealer.seal(PayloadKind.FILE, (file.id,), encode_record(file))
        await self._commands(("HSET", name, "m", data), ("PEXPIREAT", name, file.expires_at * 1000))

    async def get(self, file_id: str, tenant: str) -> StoredFile:
        """A file's description. Raises FileNotStored."""
        (data,) = await self._commands(("HGET", keys.stored_file(file_id), "m"))
        if data is None:
            raise file_not_stored(file_id)
        known = self._sealer.open(PayloadKind.FILE, (file_id,), data)
        file = decode_record(StoredFile, known)
        if file.tenant != tenant:
            raise file_not_stored(file_id)
        return file

    async def chunk(self, file: StoredFile, number: int) -> bytes:
        """One piece of its content. Raises FileNotStored if it has expired meanwhile."""
        (data,) = await self._commands(("HGET", keys.stored_file(file.id), number))
        if not isinstance(data, bytes):
            raise FileNotStored(f"the file {file.id!r} has expired")
        binding = (file.id, file.tenant, number)
        return await opened(self._sealer, PayloadKind.FILE_PIECE, binding, data)

    async def content(self, file: StoredFile) -> bytes:
        """The whole content. Raises FileNotStored."""
        return b"".join([await self.chunk(file, number) for number in range(file.chunks)])

    async def all_of(self, tenant: str) -> list[StoredFile]:
        """A tenant's files, newest first."""
        found: list[StoredFile] = []
        for file_id in await self._index(tenant).numbers():
            try:
                found.append(await self.get(file_id, tenant))
            except (FileNotStored, MessageError):
                continue  # being written, or just expired
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
    """Splits content into the pieces in which it is stored."""
    return [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
