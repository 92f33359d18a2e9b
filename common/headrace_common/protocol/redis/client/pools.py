"""Makes clients for the servers of an endpoint, with their common options."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .client import MultiplexedClient
from .credentials import CredentialFiles
from .detachable import TcpConnection, TlsConnection, UnixConnection
from .endpoint import Address, Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """The settings of a connection to Redis. Times are in seconds.

    `block`: how long one blocking read waits before it is repeated. `credentials`: a folder with
    the user's name and password, instead of those in the URL. `server`: connect to this server
    instead of those in the URL, with the same user.
    """

    url: str
    credentials: Path | None = None
    server: Address | None = None
    command_timeout: float = 5.0
    connect_timeout: float = 5.0
    block: float = 10.0
    max_connections: int = 16


class Pools:
    """Makes clients for the servers of one endpoint."""

    def __init__(self, endpoint: Endpoint, config: ConnectionConfig) -> None:
        self.endpoint = endpoint
        self.config = config

    def client(self, server: Mapping[str, Any]) -> MultiplexedClient:
        """A client of one server. `server` is redis-py's options with its address."""
        pool = ConnectionPool(**self._options(server))
        return MultiplexedClient(
            pool, self.config.command_timeout, max_connections=self.config.max_connections
        )

    def reader(self, server: Mapping[str, Any]) -> MultiplexedClient:
        """A client with one connection for blocking reads."""
        pool = ConnectionPool(**self._options(server))
        return MultiplexedClient(pool, self.config.block + self.config.command_timeout, single=True)

    def sentinel(self, address: Address, timeout: float) -> MultiplexedClient:
        """A client of a Sentinel, with one connection and one user of its own."""
        options = {**transport(self.endpoint), **self.endpoint.sentinel_options, **at(address)}
        return MultiplexedClient(ConnectionPool(**options, **self._common()), timeout)

    def _options(self, server: Mapping[str, Any]) -> dict[str, Any]:
        options = {**transport(self.endpoint), **self.endpoint.options, **server, **self._common()}
        if self.config.credentials is not None:
            options = {k: v for k, v in options.items() if k not in ("username", "password")}
            options["credential_provider"] = CredentialFiles(self.config.credentials)
        return options

    def _common(self) -> dict[str, Any]:
        return {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "retry_on_error": [],
            "socket_timeout": None,
            "socket_connect_timeout": self.config.connect_timeout,
        }


def at(address: Address) -> dict[str, Any]:
    """redis-py's options for a server's address."""
    host, port = address
    return {"host": host, "port": port}


def transport(endpoint: Endpoint) -> dict[str, Any]:
    """redis-py's options for the way to a server."""
    if "path" in endpoint.options:
        return {"connection_class": UnixConnection}
    kind = TlsConnection if endpoint.tls else TcpConnection
    return {"connection_class": kind, "socket_keepalive": True}
