"""redis-py's connections, from which a Line takes over what they have connected."""

import asyncio
from collections.abc import Callable
from typing import cast

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ResponseError


class TakenConnection(AbstractConnection):
    """Once it is connected, somebody else speaks over its transport."""

    _reader: asyncio.StreamReader | None
    _writer: asyncio.StreamWriter | None

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


class TcpConnection(TakenConnection, Connection):
    """Over TCP."""


class TlsConnection(TakenConnection, SSLConnection):
    """Over TLS."""


class UnixConnection(TakenConnection, UnixDomainSocketConnection):
    """Over a socket of the file system."""
