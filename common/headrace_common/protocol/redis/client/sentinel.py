"""Connects to the master that Sentinels name; asks them again for each connection.

Every connection checks that its server is a master: a Sentinel may be out of date, and a blocking
read on a replica would never notice.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from .client import Argument, Command, MultiplexedClient, RedisClient
from .detachable import TcpConnection, TlsConnection
from .endpoint import Address
from .pools import Pools

logger = logging.getLogger(__name__)

Locate = Callable[[], Awaitable[Address]]

ASK_SECONDS = 2.0  # seconds for one Sentinel; all are asked at once


class Sentinels:
    """Finds the master that most of the answering Sentinels name."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def master(self) -> Address:
        """The master's address. Raises redis' ConnectionError if no Sentinel knows it."""
        addresses = self._pools.endpoint.addresses
        asked = [asyncio.create_task(self._ask(address)) for address in addresses]
        votes: Counter[Address] = Counter()
        try:
            for answer in asyncio.as_completed(asked):
                found = await answer
                if found is not None:
                    votes[found] += 1
                    if votes[found] * 2 > len(addresses):
                        return found
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not votes:
            name = self._pools.endpoint.master
            raise RedisConnectionError(f"no Sentinel of {len(addresses)} knows the master {name!r}")
        return votes.most_common(1)[0][0]

    async def _ask(self, address: Address) -> Address | None:
        client = self._pools.sentinel(address, ASK_SECONDS)
        name = self._pools.endpoint.master
        try:
            reply = await client.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
        except RedisError as error:
            where = "{}:{}".format(*address)
            logger.warning("sentinel did not answer", extra={"at": where, "error": str(error)})
            return None
        finally:
            await client.close()
        return None if reply is None else (reply[0].decode(), int(reply[1]))

    def client(self) -> MultiplexedClient:
        return self._pools.client(self._server(self.master))

    def reader(self) -> RedisClient:
        return MasterReader(self.master, lambda locate: self._pools.reader(self._server(locate)))

    def _server(self, locate: Locate) -> dict[str, Any]:
        kind = MasterSSLConnection if self._pools.endpoint.tls else MasterConnection
        return {"connection_class": kind, "locate": locate, "redis_connect_func": _check_role}


class MasterConnection(TcpConnection):
    """A connection that asks the Sentinels for its address before it connects."""

    def __init__(self, *, locate: Locate, **options: Any) -> None:
        self._locate = locate
        super().__init__(**options)

    async def _connect(self) -> None:
        self.host, self.port = await self._locate()
        await super()._connect()


class MasterSSLConnection(MasterConnection, TlsConnection):
    """A MasterConnection over TLS."""


async def _check_role(connection: Connection) -> None:
    await connection.on_connect()
    await connection.send_command("ROLE")
    role = (await connection.read_response())[0]
    if role != b"master":
        raise RedisConnectionError(
            f"redis at {connection.host}:{connection.port} is {role.decode()} and not the master"
        )


class MasterReader(RedisClient):
    """Blocking reads from the master; after an empty read it checks that it still is the master."""

    def __init__(self, locate: Locate, connect: Callable[[Locate], MultiplexedClient]) -> None:
        self._find = locate
        self._master: Address | None = None
        self._client = connect(self._locate)

    async def _locate(self) -> Address:
        self._master = await self._find()
        return self._master

    async def command(self, *args: Argument) -> Any:
        reply = await self._client.command(*args)
        if not reply:
            await self._check_master()
        return reply

    async def _check_master(self) -> None:
        """Checks the role, since a master that lost its replicas may still be reachable."""
        try:
            master = await self._find()
        except RedisConnectionError:
            return  # without Sentinels there is no failover
        if master != self._master:
            raise RedisConnectionError("the master is another one now")

    async def pipeline(
        self, commands: Sequence[Command], *, raise_on_error: bool = True
    ) -> list[Any]:
        return await self._client.pipeline(commands, raise_on_error=raise_on_error)

    async def reconnect(self) -> None:
        await self._client.reconnect()

    def fail_pending(self, error: RedisError) -> None:
        self._client.fail_pending(error)

    async def close(self) -> None:
        await self._client.close()
