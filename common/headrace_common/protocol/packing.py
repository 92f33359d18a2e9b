"""redis-py's connections, from which a Line takes over what they have connected.

Commands are packed by hiredis instead of in Python: one message of bytes each; what it says to the
server is the same.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import hiredis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ResponseError


def pack(*args: Any) -> bytes:
    """A command as bytes; a first word like `XINFO GROUPS` is two."""
    name = args[0]
    words = name.split() if isinstance(name, str) else (name,)
    packed: bytes = hiredis.pack_command((*words, *args[1:]))
    return packed


class TakenConnection(AbstractConnection):
    """Once it is connected, somebody else speaks over its transport."""

    _reader: asyncio.StreamReader | None
    _writer: asyncio.StreamWriter | None

    def pack_command(self, *args: Any) -> list[bytes]:
        return [pack(*args)]

    @property
    def transport(self) -> asyncio.Transport:
        assert self._writer is not None, "it is connected"
        return cast(asyncio.Transport, self._writer.transport)

    @property
    def parse_error(self) -> Callable[[str], ResponseError]:
        """Makes the error that a server's words stand for."""
        return cast(Callable[[str], ResponseError], self._parser.parse_error)

    def forget(self) -> None:
        """The transport is closed: nothing is left to be closed here."""
        self._reader = self._writer = None


class PackedConnection(TakenConnection, Connection):
    """Over TCP."""


class PackedSSLConnection(TakenConnection, SSLConnection):
    """Over TLS."""


class PackedUnixConnection(TakenConnection, UnixDomainSocketConnection):
    """Over a socket of the file system."""
