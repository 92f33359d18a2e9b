"""Connections to Redis or Valkey, and the check that a server can keep the protocol's promises.

No command is repeated by the client library: a lost reply would write twice. What is safe to repeat
is repeated here, by name. Blocking reads have connections of their own.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..errors import BackendUnavailable, BackendUnfit, HeadraceError, SettingsError
from .client import Client, backoff
from .scripts import Scripts, load_scripts

logger = logging.getLogger(__name__)
T = TypeVar("T")

OLDEST_VERSION = (6, 2)
FLAGS_VERSION = (7, 0)  # since then a script may declare flags
_BROKEN = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, MasterDownError)
_REFUSED_FOR_NOW = ("OOM", "NOREPLICAS", "MISCONF", "BUSY", "TRYAGAIN", "CLUSTERDOWN")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Times in seconds. `block`: how long one blocking read waits before it asks again."""

    url: str
    command_timeout: float = 5.0
    connect_timeout: float = 5.0
    block: float = 10.0
    max_connections: int = 16


class Connection:
    """One process's way to Redis: a small pool for commands, a connection a blocking read."""

    def __init__(self, config: ConnectionConfig) -> None:
        self.config = config
        try:
            pool = BlockingConnectionPool.from_url(
                config.url,
                timeout=config.command_timeout,
                max_connections=config.max_connections,
                **self._options(),
            )
        except ValueError as error:
            raise SettingsError(f"redis url: {error}") from error
        self.client = Client(pool, config.command_timeout)
        self._scripts: Scripts | None = None

    def _options(self) -> dict[str, Any]:
        return {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "retry_on_error": [],
            "socket_timeout": None,
            "socket_connect_timeout": self.config.connect_timeout,
            **({} if self.config.url.startswith("unix:") else {"socket_keepalive": True}),
        }

    def reader(self) -> Client:
        """A client with one connection, for a blocking read alone. The caller closes it."""
        pool = ConnectionPool.from_url(self.config.url, max_connections=1, **self._options())
        return Client(pool, self.config.block + self.config.command_timeout, single=True)

    async def scripts(self) -> Scripts:
        """The scripts as this server takes them. Raises redis' errors."""
        if self._scripts is None:
            info = await self.client.command("INFO", "server")
            self._scripts = Scripts(
                self.client, load_scripts(shebang=server_version(info) >= FLAGS_VERSION)
            )
        return self._scripts

    async def run(self, name: str, keys: list[str], args: list[Any], *, tries: int = 1) -> Any:
        """Runs a script; with `tries` > 1 again after an error of the connection.

        Raises BackendUnavailable.
        """
        return await self.attempt(lambda: self._run(name, keys, args), tries=tries)

    async def _run(self, name: str, keys: list[str], args: list[Any]) -> Any:
        return await (await self.scripts()).run(name, keys, args)

    async def attempt(self, action: Callable[[], Awaitable[T]], *, tries: int = 1) -> T:
        """Runs an action; raises BackendUnavailable when its last try failed for want of Redis."""
        for attempt in range(tries):
            try:
                return await action()
            except RedisError as error:
                failed = translate(error)
                if failed is None:
                    raise
                await self._heal(error)
                if attempt + 1 == tries or isinstance(error, OutOfMemoryError):
                    raise failed from error
            await backoff(attempt)
        raise AssertionError("at least one try")

    async def _heal(self, error: RedisError) -> None:
        """A demoted primary keeps its connections: leave them, the name may point elsewhere now."""
        if isinstance(error, ReadOnlyError | MasterDownError):
            await self.client.reconnect()

    async def close(self) -> None:
        await self.client.close()


def translate(error: RedisError) -> HeadraceError | None:
    """The error that callers know, or None where it is a bug of ours."""
    text = str(error)
    if isinstance(error, (*_BROKEN, OutOfMemoryError)):
        return BackendUnavailable(f"redis: {text or type(error).__name__}")
    if isinstance(error, NoPermissionError) or "ACL failure" in text or "NOPERM" in text:
        return BackendUnfit(f"redis: the user lacks a permission: {text}")
    if isinstance(error, ResponseError) and text.startswith(_REFUSED_FOR_NOW):
        return BackendUnavailable(f"redis: {text}")
    return None


async def entries(
    connection: Connection,
    key: str,
    first: Callable[[Client, str], Awaitable[str]],
) -> AsyncIterator[tuple[bytes, dict[bytes, bytes]]]:
    """A stream's entries for ever, read by blocking on the socket; survives any loss of Redis.

    `first` says where to read from, given a new connection and where reading stopped ("" at
    first); it is asked again after every reconnect.
    """
    cursor, failures = "", 0
    block = int(connection.config.block * 1000)
    while True:
        client = connection.reader()
        try:
            cursor = await first(client, cursor)
            while True:
                reply = await client.command("XREAD", "BLOCK", block, "STREAMS", key, cursor)
                failures = 0
                for _, batch in reply or ():
                    for entry_id, fields in batch:
                        cursor = entry_id.decode()
                        yield entry_id, fields
        except RedisError as error:
            if translate(error) is None:
                raise
            logger.warning("redis read interrupted", extra={"stream": key, "error": str(error)})
        finally:
            await client.close()
        await backoff(failures)
        failures = min(failures + 1, 10)


def server_version(info: dict[str, Any]) -> tuple[int, ...]:
    """(major, minor) of Redis; a Valkey counts as the Redis 7.2 that it began as, or newer."""
    text = str(info.get("redis_version", "0.0"))
    parts = text.split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


async def check_backend(connection: Connection) -> None:
    """Refuses a server that cannot keep the protocol's promises.

    Raises BackendUnfit, which names what is wrong and the remedy, or BackendUnavailable.
    """
    info = await connection.attempt(lambda: _info(connection), tries=3)
    _check_version(info)
    _check_memory(info)
    _check_persistence(info)
    scratch = f"{{headrace.probe.{secrets.token_hex(8)}}}"
    try:
        await connection.run("probe", [f"q:{scratch}", f"r:{scratch}"], [])
    except ResponseError as error:
        raise BackendUnfit(
            f"redis cannot run the protocol's scripts ({error}); use Redis >= 6.2 or Valkey with "
            "EVALSHA and streams, and let the user run +@scripting +@stream"
        ) from error
    except BackendUnfit as error:
        raise BackendUnfit(
            f"{error}; grant +@read +@write +@stream +@scripting +time +info and the key patterns "
            "of docs/protocol.md"
        ) from error


async def _info(connection: Connection) -> dict[str, Any]:
    try:
        info: dict[str, Any] = await connection.client.command("INFO")
    except NoPermissionError as error:
        raise BackendUnfit(f"redis: {error}; grant +info to the user") from error
    return info


def _check_version(info: dict[str, Any]) -> None:
    if server_version(info) < OLDEST_VERSION:
        raise BackendUnfit(
            f"redis {info.get('redis_version')} is too old: use Redis 6.2 or later, or Valkey"
        )


def _check_memory(info: dict[str, Any]) -> None:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise BackendUnfit(
            f"redis has maxmemory-policy {policy} and would drop requests when memory is short: "
            "set maxmemory-policy noeviction"
        )


def _check_persistence(info: dict[str, Any]) -> None:
    if not int(info.get("aof_enabled", 0)):
        logger.warning(
            "redis keeps no append-only file: requests in flight survive its restart only while "
            "their gateway lives; set appendonly yes"
        )


async def wait_for_backend(connection: Connection, seconds: float) -> None:
    """check_backend, repeated while Redis cannot be reached. Raises as that does, at last."""
    deadline = asyncio.get_running_loop().time() + seconds
    attempt = 0
    while True:
        try:
            return await check_backend(connection)
        except BackendUnavailable:
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await backoff(attempt)
        attempt += 1
