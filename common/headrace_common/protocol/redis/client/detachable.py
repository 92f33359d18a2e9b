"""redis-py's connections with a transport that a MultiplexedConnection takes over."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ResponseError


class DetachableConnection(AbstractConnection):
    """A connection whose transport can be detached once it is connected."""

    _reader: asyncio.StreamReader | None
    _writer: asyncio.StreamWriter | None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._writer is not None, "it is connected"
        return cast(asyncio.Transport, self._writer.transport)

    @property
    def parse_error(self) -> Callable[[str], ResponseError]:
        """The redis error for a server's error text."""
        return cast(Callable[[str], ResponseError], self._parser.parse_error)

    def detach(self) -> None:
        """Leaves the transport to its user, who closes it."""
        self._reader = self._writer = None

    async def disconnect(self, *_: Any, **__: Any) -> None:
        """Closes the socket immediately; a server that does not answer the end of TLS would keep
        it open for half a minute."""
        self._parser.on_disconnect()  # type: ignore[no-untyped-call]
        writer = self._writer
        self.detach()
        if writer is not None:
            writer.transport.abort()
            with suppress(OSError):  # the error that ended it
                await writer.wait_closed()


class TcpConnection(DetachableConnection, Connection):
    """A connection over TCP.

    It resolves its host itself: a cancelled create_connection of uvloop leaves a lookup, whose
    failure would be logged as an exception that was never retrieved.
    """

    _address = ""

    async def _connect(self) -> None:
        """Tries the host's addresses one after the other. Raises the last one's error."""
        failed = OSError(f"{self.host} has no address")
        async with asyncio.timeout(self.socket_connect_timeout):
            found = await asyncio.get_running_loop().getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM
            )
            for self._address in dict.fromkeys(str(place[0]) for *_, place in found):
                try:
                    await super()._connect()  # type: ignore[no-untyped-call]
                except OSError as error:
                    failed = error
                else:
                    return
        raise failed

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "host": self._address}


class TlsConnection(TcpConnection, SSLConnection):
    """A connection over TLS. The certificate must be that of the host's name."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "server_hostname": self.host}


class UnixConnection(DetachableConnection, UnixDomainSocketConnection):
    """A connection over a Unix socket."""
