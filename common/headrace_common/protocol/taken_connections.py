"""redis-py's connections, from which a Line takes over what they have connected."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

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
        """Drops the transport, which somebody else closes or has closed."""
        self._reader = self._writer = None

    async def disconnect(self, *_: Any, **__: Any) -> None:
        """Closes the socket at once: a server that does not answer the end of TLS would keep it
        open for half a minute."""
        self._parser.on_disconnect()  # type: ignore[no-untyped-call]
        writer = self._writer
        self.forget()
        if writer is not None:
            writer.transport.abort()
            with suppress(OSError):  # what ended it
                await writer.wait_closed()


class TcpConnection(TakenConnection, Connection):
    """Over TCP."""


class TlsConnection(TakenConnection, SSLConnection):
    """Over TLS."""


class UnixConnection(TakenConnection, UnixDomainSocketConnection):
    """Over a socket of the file system."""
