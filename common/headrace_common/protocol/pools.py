"""Connections to one server of an endpoint, with the options that all of them share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .client import LineClient
from .endpoint import Address, Endpoint
from .taken_connections import TcpConnection, TlsConnection, UnixConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Times in seconds. `block`: how long one blocking read waits before it asks again."""

    url: str
    command_timeout: float = 5.0
    connect_timeout: float = 5.0
    block: float = 10.0
    max_connections: int = 16


class Pools:
    """Makes clients of the servers of one endpoint."""

    def __init__(self, endpoint: Endpoint, config: ConnectionConfig) -> None:
        self.endpoint = endpoint
        self.config = config

    def client(self, server: Mapping[str, Any]) -> LineClient:
        """A client of one server. `server`: redis-py's options that say where it is."""
        pool = ConnectionPool(**self._options(server))
        return LineClient(pool, self.config.command_timeout, lines=self.config.max_connections)

    def reader(self, server: Mapping[str, Any]) -> LineClient:
        """A client with one connection, for a blocking read alone."""
        pool = ConnectionPool(**self._options(server))
        return LineClient(pool, self.config.block + self.config.command_timeout, single=True)

    def sentinel(self, address: Address, timeout: float) -> LineClient:
        """A client of a Sentinel, with one connection and one user of its own."""
        options = {**transport(self.endpoint), **self.endpoint.sentinel_options, **at(address)}
        return LineClient(ConnectionPool(**options, **self._common()), timeout)

    def _options(self, server: Mapping[str, Any]) -> dict[str, Any]:
        return {**transport(self.endpoint), **self.endpoint.options, **server, **self._common()}

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
