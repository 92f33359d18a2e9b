"""Connections to Redis or Valkey, and the check that a server can give the protocol's guarantees.

The client library repeats no command, since a repetition after a lost reply could write twice. Safe
commands are repeated here. Blocking reads have connections of their own.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
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

from ....errors import BackendUnavailable, BackendUnfit, HeadraceError
from ....sealing.sealer import NULL_SEALER, Sealer
from ....wire.keys import scratch_keys
from ..clock import RedisClock
from ..scripts import Scripts, load_scripts
from .client import RedisClient, backoff
from .cluster import ClusterClient
from .endpoint import Topology, parse_endpoint
from .pools import ConnectionConfig as ConnectionConfig
from .pools import Pools, at
from .presence import Presence
from .sentinel import Sentinels

logger = logging.getLogger(__name__)
T = TypeVar("T")

OLDEST_VERSION = (6, 2)
FLAGS_VERSION = (7, 0)  # the first version in which a script may declare flags
_BROKEN = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, MasterDownError)
_LEFT = (ReadOnlyError, MasterDownError, RedisTimeoutError)
_DEMOTED = ("NOREPLICAS", "UNBLOCKED")
_MOVING = (AskError, ClusterDownError, MovedError, TryAgainError)
PROBES = 8  # slots of a cluster that are tried until one is usable
_SCHEMES = {
    "standalone": "redis://HOST:6379/0",
    "sentinel": "redis+sentinel://HOST1:26379,HOST2:26379/MASTER/0",
    "cluster": "redis+cluster://HOST1:6379,HOST2:6379",
}
_REFUSED_FOR_NOW = ("OOM", "MISCONF", "BUSY", *_DEMOTED)


class Connection:
    """One process's access to Redis: a client for commands, and one for each blocking read.

    `sealer` seals prompts and answers on their way to Redis.
    """

    def __init__(self, config: ConnectionConfig, sealer: Sealer = NULL_SEALER) -> None:
        """Opens nothing yet. Raises SettingsError if the URL is wrong."""
        self.config = config
        self.sealer = sealer
        self.clock = RedisClock()
        self.topology, self.client, self._reader = _clients(config)
        self._scripts: Scripts | None = None
        self._presence = Presence(self._reader, self.client.fail_pending)

    def reader(self) -> RedisClient:
        """A client with one connection for blocking reads of keys that share a hash tag.

        The caller closes it.
        """
        return self._reader()

    async def scripts(self) -> Scripts:
        """The scripts for this kind of server. Raises redis' errors."""
        if self._scripts is None:
            info = await self.client.command("INFO", "server")
            self._scripts = Scripts(
                self.client, load_scripts(shebang=server_version(info) >= FLAGS_VERSION)
            )
        return self._scripts

    async def run(self, name: str, keys: list[str], args: list[Any], *, tries: int = 1) -> Any:
        """Runs a script; with `tries` > 1 again after a connection error.

        Raises BackendUnavailable.
        """
        return await self.attempt(lambda: self._run(name, keys, args), tries=tries)

    async def _run(self, name: str, keys: list[str], args: list[Any]) -> Any:
        return await (await self.scripts()).run(name, keys, args)

    async def attempt(self, action: Callable[[], Awaitable[T]], *, tries: int = 1) -> T:
        """Runs an action; raises BackendUnavailable if its last try could not reach Redis."""
        for attempt in range(tries):
            try:
                with self._presence.needed():
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

    async def replicas(self) -> list["Connection"]:
        """A connection to each replica of the master, as the same user; the caller closes them.

        Raises BackendUnavailable.
        """
        role = await self.attempt(lambda: self.client.command("ROLE"), tries=2)
        places = [(host.decode(), int(port)) for host, port, _ in role[2]]
        return [Connection(replace(self.config, server=place)) for place in places]

    async def measure_clock(self, near: str) -> None:
        """Measures Redis' clock; in a cluster that of the node with the key `near`.

        Raises BackendUnavailable.
        """

        async def ask() -> tuple[int, int]:
            _, (seconds, microseconds) = await self.client.pipeline([("EXISTS", near), ("TIME",)])
            return seconds, microseconds

        await self.attempt(lambda: self.clock.measure(ask))

    def watch(self, patience: float) -> None:
        """From now on, checks the server whenever commands are late.

        While it has not answered for `patience` seconds, `attempt` fails immediately. Nodes of a
        cluster are not watched: each has other keys and fails independently.
        """
        if self.topology is not Topology.CLUSTER:
            self._presence.watch(patience)

    async def _heal(self, error: RedisError) -> None:
        """Reconnects, since a demoted primary keeps its connections and its name may have moved."""
        if isinstance(error, _LEFT) or _says(error, _DEMOTED):
            await self.client.reconnect()

    async def close(self) -> None:
        await self._presence.close()
        await self.client.close()


def translate(error: RedisError) -> HeadraceError | None:
    """The project's error for a redis error; None if it is a bug of this project."""
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
    """Whether a server's error has this code.

    In scripts of Redis 6, the position of the failure precedes the code; in redis-py's pipelines,
    the command precedes it.
    """
    text = str(error)
    return text.startswith(codes) or any(
        f"-{code} " in text or f"caused error: ('{code} " in text for code in codes
    )


def _clients(config: ConnectionConfig) -> tuple[Topology, RedisClient, Callable[[], RedisClient]]:
    """The topology, a client for commands, and a function that makes clients for blocking reads."""
    endpoint = parse_endpoint(config.url)
    pools = Pools(endpoint, config)
    if config.server is not None:
        place = at(config.server)
        return Topology.SINGLE, pools.client(place), lambda: pools.reader(place)
    if endpoint.topology is Topology.CLUSTER:
        cluster = ClusterClient(pools)
        return endpoint.topology, cluster, cluster.reader
    if endpoint.topology is Topology.SENTINEL:
        sentinels = Sentinels(pools)
        return endpoint.topology, sentinels.client(), sentinels.reader
    server = at(endpoint.addresses[0]) if endpoint.addresses else {}
    return endpoint.topology, pools.client(server), lambda: pools.reader(server)


def server_version(info: dict[str, Any]) -> tuple[int, ...]:
    """(major, minor) of Redis; a Valkey counts as Redis 7.2, from which it was forked, or newer."""
    text = str(info.get("redis_version", "0.0"))
    parts = text.split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


async def check_backend(connection: Connection, model: str | None = None) -> None:
    """Checks that a server can give the protocol's guarantees; with `model`, for an engine of it.

    Unreachable nodes of a cluster are not checked, since the others work without them. Raises
    BackendUnfit, which names the problem and the remedy, or BackendUnavailable.
    """
    for info in await connection.attempt(lambda: _infos(connection), tries=3):
        _check_mode(info, connection.topology)
        _check_version(info)
        _check_memory(info)
        _check_persistence(info)
    try:
        await _probe(connection, model)
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


async def _probe(connection: Connection, model: str | None) -> None:
    """Runs a script on any reachable node of a cluster."""
    for left in reversed(range(PROBES if connection.topology is Topology.CLUSTER else 1)):
        try:
            await connection.run("probe", scratch_keys(model), [])
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
    """Runs an action, repeatedly while Redis cannot be reached. Raises the last error."""
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
