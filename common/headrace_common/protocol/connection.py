"""Connections to Redis or Valkey, and the check that a server can keep the protocol's promises.

No command is repeated by the client library: a lost reply would write twice. What is safe to repeat
is repeated here, by name. Blocking reads have connections of their own.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..errors import BackendUnavailable, BackendUnfit, HeadraceError
from .client import Client, backoff
from .cluster import ClusterClient
from .endpoint import Topology, parse_endpoint
from .pools import ConnectionConfig as ConnectionConfig
from .pools import Pools, at
from .redis_clock import RedisClock
from .scripts import Scripts, load_scripts
from .sentinel import Sentinels

logger = logging.getLogger(__name__)
T = TypeVar("T")

OLDEST_VERSION = (6, 2)
FLAGS_VERSION = (7, 0)  # since then a script may declare flags
_BROKEN = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, MasterDownError)
_LEFT = (ReadOnlyError, MasterDownError, RedisTimeoutError)
_DEMOTED = ("NOREPLICAS", "UNBLOCKED")
_MOVING = (AskError, ClusterDownError, MovedError, TryAgainError)
PROBES = 8  # of a cluster's slots, one after the other until one can be used
MOST_ENTRIES = 16  # at a time, so that a reader far behind does not hold up all else
_SCHEMES = {
    "standalone": "redis://HOST:6379/0",
    "sentinel": "redis+sentinel://HOST1:26379,HOST2:26379/MASTER/0",
    "cluster": "redis+cluster://HOST1:6379,HOST2:6379",
}
_REFUSED_FOR_NOW = ("OOM", "MISCONF", "BUSY", *_DEMOTED)


class Connection:
    """One process's way to Redis: a small pool for commands, a connection a blocking read."""

    def __init__(self, config: ConnectionConfig) -> None:
        """Raises SettingsError where the URL is wrong."""
        self.config = config
        self.clock = RedisClock()
        self.topology, self.client, self._reader = _clients(config)
        self._scripts: Scripts | None = None

    def reader(self) -> Client:
        """A client with one connection, for a blocking read alone, of keys that share a hash tag.
        The caller closes it."""
        return self._reader()

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

    async def measure_clock(self, near: str) -> None:
        """Compares the clocks; in a cluster with that of the node that has the key `near`.

        Raises BackendUnavailable.
        """

        async def ask() -> tuple[int, int]:
            _, (seconds, microseconds) = await self.client.pipeline([("EXISTS", near), ("TIME",)])
            return seconds, microseconds

        await self.attempt(lambda: self.clock.measure(ask))

    async def _heal(self, error: RedisError) -> None:
        """A demoted primary keeps its connections: leave them, the name may point elsewhere now."""
        if isinstance(error, _LEFT) or _says(error, _DEMOTED):
            await self.client.reconnect()

    async def close(self) -> None:
        await self.client.close()


def translate(error: RedisError) -> HeadraceError | None:
    """The error that callers know, or None where it is a bug of ours."""
    text = str(error)
    if isinstance(error, _MOVING):
        return BackendUnavailable(f"redis: {error.status_code} {text}")
    if isinstance(error, (*_BROKEN, OutOfMemoryError)) or _says(error, ("READONLY",)):
        return BackendUnavailable(f"redis: {text or type(error).__name__}")
    if isinstance(error, NoPermissionError) or "ACL failure" in text or "NOPERM" in text:
        return BackendUnfit(f"redis: the user lacks a permission: {text}")
    if isinstance(error, ResponseError) and _says(error, _REFUSED_FOR_NOW):
        return BackendUnavailable(f"redis: {text}")
    return None


def _says(error: RedisError, codes: tuple[str, ...]) -> bool:
    """Whether the server's answer begins with a code: in a script of Redis 6 behind where it
    failed, in redis-py's pipelines behind which command did."""
    text = str(error)
    return text.startswith(codes) or any(
        f"-{code} " in text or f"caused error: ('{code} " in text for code in codes
    )


def _clients(config: ConnectionConfig) -> tuple[Topology, Client, Callable[[], Client]]:
    """How Redis is reached, a client for commands, and what makes clients for blocking reads."""
    endpoint = parse_endpoint(config.url)
    pools = Pools(endpoint, config)
    if endpoint.topology is Topology.CLUSTER:
        cluster = ClusterClient(pools)
        return endpoint.topology, cluster, cluster.reader
    if endpoint.topology is Topology.SENTINEL:
        sentinels = Sentinels(pools)
        return endpoint.topology, sentinels.client(), sentinels.reader
    server = at(endpoint.addresses[0]) if endpoint.addresses else {}
    return endpoint.topology, pools.client(server), lambda: pools.reader(server)


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
                reply = await client.command(
                    "XREAD", "COUNT", MOST_ENTRIES, "BLOCK", block, "STREAMS", key, cursor
                )
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
    """Refuses a server that cannot keep the protocol's promises. Nodes of a cluster that are away
    are not checked: what is on the others goes on without them.

    Raises BackendUnfit, which names what is wrong and the remedy, or BackendUnavailable.
    """
    for info in await connection.attempt(lambda: _infos(connection), tries=3):
        _check_mode(info, connection.topology)
        _check_version(info)
        _check_memory(info)
        _check_persistence(info)
    try:
        await _probe(connection)
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


async def _probe(connection: Connection) -> None:
    """Runs a script, on any node of a cluster that is there."""
    for left in reversed(range(PROBES if connection.topology is Topology.CLUSTER else 1)):
        scratch = f"{{headrace.probe.{secrets.token_hex(8)}}}"
        try:
            await connection.run("probe", [f"q:{scratch}", f"r:{scratch}"], [])
        except BackendUnavailable:
            if not left:
                raise
        else:
            return


async def _infos(connection: Connection) -> list[dict[str, Any]]:
    try:
        return await connection.client.each("INFO")
    except NoPermissionError as error:
        raise BackendUnfit(
            f"redis: {error}; grant +info to the user, with Sentinels +role too, with a cluster "
            "+cluster|slots +asking"
        ) from error


def _check_mode(info: dict[str, Any], topology: Topology) -> None:
    mode = info.get("redis_mode") or info.get("server_mode", "standalone")  # Valkey has the latter
    wanted = "cluster" if topology is Topology.CLUSTER else "standalone"
    if mode != wanted and mode in _SCHEMES:
        raise BackendUnfit(f"this redis runs as {mode}: use a URL like {_SCHEMES[mode]}")


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


async def when_reachable(action: Callable[[], Awaitable[T]], seconds: float) -> T:
    """An action, repeated while Redis cannot be reached. Raises as that does, at last."""
    deadline = asyncio.get_running_loop().time() + seconds
    attempt = 0
    while True:
        try:
            return await action()
        except BackendUnavailable as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            if attempt == 0:
                logger.warning("waiting for redis", extra={"error": str(error)})
        await backoff(attempt)
        attempt += 1
