"""Sends commands to the nodes of a cluster.

Redirections are followed, since a redirected command was not executed; nothing else is repeated.

redis-py's own cluster client is not used: it repeats whole pipelines, sends ASKING and the command
on different connections, and renews connections under readers that must notice.
"""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ....errors import BackendUnfit
from .client import Argument, Command, MultiplexedClient, RedisClient, scan_with
from .endpoint import Address
from .pools import Pools, at
from .slots import SlotMap, slot_of

logger = logging.getLogger(__name__)

REDIRECTIONS = 5
ASK_SECONDS = 2.0  # seconds, for one node that is asked for the slots
_BROKEN = (RedisConnectionError, RedisTimeoutError, ClusterDownError)
_ASKING: Command = ("ASKING",)


class ClusterClient(RedisClient):
    """A RedisClient for a cluster, with a client for each node; follows slots that move."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._map = SlotMap()
        self._stale = True
        self._refreshing = asyncio.Lock()
        self._clients: dict[Address, MultiplexedClient] = {}

    def reader(self) -> RedisClient:
        return ClusterReader(self, self._pools)

    async def command(self, *args: Argument) -> Any:
        (result,) = await self.pipeline([args])
        return result

    async def pipeline(
        self, commands: Sequence[Command], *, raise_on_error: bool = True
    ) -> list[Any]:
        """Like RedisClient.pipeline. Commands to one node are sent together; one without a key goes
        to the node of the first key."""
        slots = [slot_of(command) for command in commands]
        default = next((slot for slot in slots if slot is not None), None)
        nodes: dict[Address, list[int]] = {}
        for index, slot in enumerate(slots):
            address = await self.address(default if slot is None else slot)
            nodes.setdefault(address, []).append(index)
        results: list[Any] = [None] * len(commands)
        await self._send(nodes, commands, results)
        if raise_on_error:
            for result in results:
                if isinstance(result, RedisError):
                    raise result
        return results

    async def _send(
        self,
        nodes: Mapping[Address, Sequence[int]],
        commands: Sequence[Command],
        results: list[Any],
    ) -> None:
        sent = [self._send_one(node, positions, commands) for node, positions in nodes.items()]
        found = await asyncio.gather(*sent, return_exceptions=True)
        for positions, part in zip(nodes.values(), found, strict=True):
            if isinstance(part, BaseException):
                raise part
            for position, result in zip(positions, part, strict=True):
                results[position] = await self._followed(commands[position], result)

    async def _send_one(
        self, node: Address, positions: Sequence[int], commands: Sequence[Command]
    ) -> list[Any]:
        return await self.at(node, [commands[position] for position in positions])

    async def at(self, node: Address, commands: Sequence[Command]) -> list[Any]:
        """Results or errors of commands to one node. Raises redis' connection errors."""
        try:
            results = await self._client(node).pipeline(commands, raise_on_error=False)
        except RedisError as error:
            self.learn(error, node)
            raise
        for result in results:
            self.learn(result, node)
        return results

    def learn(self, result: Any, node: Address) -> None:
        """Updates the slots from a node's error."""
        if isinstance(result, AskError | MovedError) and not result.host:
            result.host = node[0]  # where the node does not know its name
        if isinstance(result, MovedError):
            self._map.move(result.slot_id, (result.host, result.port))
        if isinstance(result, (MovedError, *_BROKEN)):
            self._stale = True

    async def _followed(self, command: Command, result: Any) -> Any:
        """The final result of a redirected command."""
        for _ in range(REDIRECTIONS):
            if isinstance(result, MovedError):  # redis-py makes it an AskError too
                (result,) = await self.at((result.host, result.port), [command])
            elif isinstance(result, AskError):
                _, result = await self.at((result.host, result.port), [_ASKING, command])
            else:
                break
        return result

    async def each(self, *args: Argument) -> list[Any]:
        await self._refresh()
        nodes = list(self._map.masters)
        asked = [self.at(node, [args]) for node in nodes]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        results = [each if isinstance(each, BaseException) else each[0] for each in answers]
        for node, result in zip(nodes, results, strict=True):
            if isinstance(result, _BROKEN):
                _note_away(node, result)
            elif isinstance(result, BaseException):
                raise result
        there = [result for result in results if not isinstance(result, _BROKEN)]
        if results and not there:
            raise results[0]
        return there

    async def scan(self, pattern: str) -> list[bytes]:
        await self._refresh()
        found: list[bytes] = []
        for node in self._map.masters:
            found += await scan_with(self._client(node).command, pattern)
        return found

    async def address(self, slot: int | None) -> Address:
        """The node of a slot; any node for None. Raises redis' errors."""
        if self._stale:
            await self._refresh()
        masters = self._map.masters
        address = next(iter(masters), None) if slot is None else self._map.master(slot)
        if address is None:
            self._stale = True
            raise ClusterDownError(f"no node of the cluster has slot {slot}")
        return address

    async def _refresh(self) -> None:
        async with self._refreshing:
            if not self._stale:
                return
            for node in self._candidates():
                reply = await self._ask(node)
                if reply:
                    self._map.load(reply, node)
                    self._stale = False
                    await self._leave()
                    return
        raise RedisConnectionError("no node of the cluster says where the slots are")

    def _candidates(self) -> list[Address]:
        """Nodes to ask, in random order, so that a faulty one is not always asked first."""
        known = list(self._map.masters)
        random.shuffle(known)
        return list(dict.fromkeys([*known, *self._pools.endpoint.addresses]))

    async def _ask(self, node: Address) -> Sequence[Any] | None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                reply: Sequence[Any] = await self._client(node).command("CLUSTER", "SLOTS")
        except (TimeoutError, *_BROKEN) as error:
            _note_away(node, error)
            return None
        except NoPermissionError:
            raise
        except ResponseError as error:
            raise BackendUnfit(
                f"redis at {_said(node)} is not a node of a cluster ({error}): use the scheme "
                "redis or redis+sentinel"
            ) from error
        return reply

    async def _leave(self) -> None:
        """Closes idle connections to nodes that are no longer masters."""
        for address, client in self._clients.items():
            if address not in self._map.masters:
                await client.reconnect()

    def _client(self, node: Address) -> MultiplexedClient:
        if node not in self._clients:
            self._clients[node] = self._pools.client(at(node))
        return self._clients[node]

    async def reconnect(self) -> None:
        self._stale = True
        for client in self._clients.values():
            await client.reconnect()

    def fail_pending(self, error: RedisError) -> None:
        for client in self._clients.values():
            client.fail_pending(error)

    async def close(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()


def _said(node: Address) -> str:
    return "{}:{}".format(*node)


def _note_away(node: Address, error: Exception) -> None:
    logger.warning(
        "node of the cluster did not answer", extra={"at": _said(node), "error": str(error)}
    )


class ClusterReader(RedisClient):
    """Blocking reads of keys of one slot, on one connection to the node that has it.

    Fails with MovedError when the slot has moved; the reader then starts again.
    """

    def __init__(self, cluster: ClusterClient, pools: Pools) -> None:
        self._cluster = cluster
        self._pools = pools
        self._node: Address | None = None
        self._client: MultiplexedClient | None = None
        self._asking = False

    async def command(self, *args: Argument) -> Any:
        if self._node is None:
            self._node = await self._cluster.address(slot_of(args))
        try:
            return await self._at(self._node, args)
        except AskError as error:
            if self._asking or isinstance(error, MovedError):
                raise
            await self.close()
            self._node, self._asking = (error.host, error.port), True
            return await self._at(self._node, args)

    async def _at(self, node: Address, args: Command) -> Any:
        """Runs a command at a node; while a slot is moving, its new node needs ASKING first."""
        if self._client is None:
            self._client = self._pools.reader(at(node))
        try:
            if self._asking:
                await self._client.command(*_ASKING)
            return await self._client.command(*args)
        except RedisError as error:
            self._cluster.learn(error, node)
            raise

    async def pipeline(
        self, commands: Sequence[Command], *, raise_on_error: bool = True
    ) -> list[Any]:
        """Runs the commands one after the other, so that a lost connection is noticed."""
        results: list[Any] = []
        for command in commands:
            try:
                results.append(await self.command(*command))
            except ResponseError as error:
                if raise_on_error:
                    raise
                results.append(error)
        return results

    async def reconnect(self) -> None:
        await self.close()

    def fail_pending(self, error: RedisError) -> None:
        if self._client is not None:
            self._client.fail_pending(error)

    async def close(self) -> None:
        client, self._client = self._client, None
        self._node, self._asking = None, False
        if client is not None:
            await client.close()
