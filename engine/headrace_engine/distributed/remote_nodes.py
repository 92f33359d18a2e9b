"""Node 0's connections to the other nodes: they join on one port, which is closed once all have.

Each node has a connection of its own, on which both sides notice the other's end, and two for each
of its ranks: commands, and the store of addresses.
"""

import ipaddress
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from threading import BoundedSemaphore, Lock, Thread
from typing import Any

from ..core.config import EngineConfig
from ..core.errors import ConfigError
from .handshake import Fields, Greeting, HandshakeFailed, WrongSecret, read_secret
from .node_greeting import NodeGreeting

logger = logging.getLogger(__name__)

OnLost = Callable[[int, str], None]

# Connections that may greet at once; further ones are closed.
MAX_GREETINGS = 32
# Seconds between two log lines about missing nodes, and between two looks for them.
LOG_INTERVAL, POLL = 10.0, 0.1
# The largest message of a node that has joined.
MAX_MESSAGE = 2**14
# Characters of a problem that nodes tell each other.
MAX_PROBLEM = 2000
# The most addresses whose refused connections are logged.
MAX_LOGGED = 100
LINKS = ("commands", "store")


@dataclass(slots=True)
class _Member:
    """A node that has joined: its greeting, the token of its ranks' connections, these by kind and
    rank, and node 0's address as the node sees it."""

    greeting: NodeGreeting
    control: Connection
    token: str
    host: str
    links: dict[tuple[str, int], Connection] = field(default_factory=dict)

    def close(self) -> None:
        for connection in (self.control, *self.links.values()):
            connection.close()


class RemoteRank:
    """A rank of another node: its connection for commands and its store's, its node's address, and
    the settings of which its node has its own."""

    def __init__(self, rank: int, member: _Member) -> None:
        self.rank = rank
        self.commands = member.links["commands", rank]
        self._store = member.links["store", rank]
        self.host: str | None = member.greeting.address
        self.settings: Mapping[str, Any] = member.greeting.own

    def serve_store(self, store: object) -> None:
        """Lets the rank use torch's `store` of node 0, in a thread of its own."""
        from .remote_store import serve_store

        Thread(target=serve_store, args=(store, self._store), daemon=True).start()

    def end(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for the rank to end. Its node ends it otherwise, once the
        connections are closed."""
        wait([self.commands], timeout)
        self.commands.close()


class RemoteNodes:
    """Waits until nodes 1 to nnodes - 1 have joined, then watches them.

    `on_lost` is told, from any thread, the node that is lost and how. Raises ConfigError if the
    port cannot be opened.
    """

    def __init__(self, config: EngineConfig, device: str, on_lost: OnLost) -> None:
        self._config, self._on_lost = config, on_lost
        self._own = NodeGreeting.of(config, device, config.master_addr)
        self._secret = read_secret(config.node_secret_file)
        self._listener = _listen(config.master_addr, config.master_port)
        self._lock = Lock()
        self._members: dict[int, _Member] = {}
        self._complete = False
        self._pending = BoundedSemaphore(MAX_GREETINGS)
        self._logged: set[str] = set()
        self._on_drain: Callable[[], object] | None = None
        self._drain_wanted = False

    def gather(self) -> None:
        """Waits, without a limit, until all nodes have joined; then closes the port."""
        log_at = time.monotonic()
        with self._listener:
            self._listener.settimeout(POLL)
            while missing := self._missing():
                if time.monotonic() >= log_at:
                    logger.info("waiting for nodes", extra={"missing": missing})
                    log_at = time.monotonic() + LOG_INTERVAL
                with suppress(TimeoutError):
                    self._accept()
        logger.info("all nodes have joined", extra={"nodes": self._config.nnodes})

    @property
    def host(self) -> str:
        """The address at which the other nodes reach this one."""
        return self._members[1].host

    def rank(self, rank: int) -> RemoteRank:
        """A rank of a node that has joined."""
        return RemoteRank(rank, self._members[rank // self._config.ranks_per_node])

    def on_drain(self, callback: Callable[[], object]) -> None:
        """Calls `callback`, from any thread, when a node wants the engine to drain, or now."""
        with self._lock:
            self._on_drain = callback
            wanted = self._drain_wanted
        if wanted:
            callback()

    def connected(self) -> None:
        """Tells the nodes that all ranks have loaded and are connected."""
        self._tell({"connected": True})

    def stop(self) -> None:
        """Tells the nodes that the engine ends as it should."""
        self._tell({"stop": True})

    def fail(self, problem: str) -> None:
        """Tells the nodes that the engine ends since it failed."""
        self._tell({"failed": problem[:MAX_PROBLEM]})

    def close(self) -> None:
        """Closes all connections."""
        self._listener.close()
        with self._lock:  # who takes a member out closes it: a file descriptor is closed once
            members = list(self._members.values())
            self._members.clear()
        for member in members:
            member.close()

    def _missing(self) -> list[int]:
        links = len(LINKS) * self._config.ranks_per_node
        with self._lock:
            joined = {node for node, one in self._members.items() if len(one.links) == links}
            missing = sorted(set(range(1, self._config.nnodes)) - joined)
            self._complete = not missing
        return missing

    def _accept(self) -> None:
        sock, address = self._listener.accept()
        if not self._pending.acquire(blocking=False):
            sock.close()
            return
        Thread(
            target=self._meet, args=(sock, address[0]), name="node-greeting", daemon=True
        ).start()

    def _meet(self, sock: socket.socket, peer: str) -> None:
        member: _Member | None = None
        greeting = Greeting(sock, self._secret)
        try:
            content = greeting.introduction()
            if "token" in content:
                self._attach(greeting, content)
            else:
                member = self._join(sock, greeting, NodeGreeting.read(content))
        except (HandshakeFailed, OSError) as error:
            self._log_refusal(peer, error)
        finally:
            sock.close()
            self._pending.release()
        if member is not None:
            self._listen_to(member)

    def _log_refusal(self, peer: str, error: Exception) -> None:
        with self._lock:
            new = peer not in self._logged and len(self._logged) < MAX_LOGGED
            self._logged |= {peer} if new else set()
        if new or isinstance(error, WrongSecret):
            extra = {"peer": peer, "error": str(error)}
            logger.warning("a connection that is not of a node was closed", extra=extra)

    def _join(self, sock: socket.socket, greeting: Greeting, node: NodeGreeting) -> _Member | None:
        if problem := self._problem(node):
            logger.warning("a node was refused", extra={"node": node.node, "error": problem})
            greeting.send({"problem": problem, "retry": False})
            return None
        token, host = secrets.token_hex(32), plain_address(sock.getsockname()[0])
        with self._lock:
            known = self._members.get(node.node)
            if known is None and not self._complete:
                greeting.send({"token": token})
                control = greeting.finish(self._config.node_timeout)
                self._members[node.node] = member = _Member(node, control, token, host)
                return member
        where = "" if known is None else f" from {known.greeting.address}"
        problem = f"node {node.node} has already joined{where}"
        greeting.send({"problem": problem, "retry": True})
        return None

    def _problem(self, node: NodeGreeting) -> str | None:
        if not 0 < node.node < self._config.nnodes:
            return f"node_rank {node.node} is not below node 0's nnodes, {self._config.nnodes}"
        return self._own.difference(node)

    def _attach(self, greeting: Greeting, content: Fields) -> None:
        """Adds the connection of a rank to its node."""
        token, kind, rank = (content.get(name) for name in ("token", "kind", "rank"))
        size = self._config.ranks_per_node
        with self._lock:
            for node, member in self._members.items():
                ours = isinstance(rank, int) and node * size <= rank < (node + 1) * size
                if member.token == token and kind in LINKS and ours:
                    greeting.send({})
                    connection = greeting.finish(self._config.node_timeout)
                    member.links[str(kind), int(str(rank))] = connection
                    return
        raise HandshakeFailed("its node has not joined")

    def _listen_to(self, member: _Member) -> None:
        """Waits for the node's end, or for its wish to drain."""
        node, how = member.greeting.node, "is gone: its connection ended"
        try:
            while True:
                message = json.loads(member.control.recv_bytes(MAX_MESSAGE))
                if "failed" in message:
                    how = f"failed: {message['failed']}"
                    break
                self._want_drain(node)
        except TimeoutError:
            how = f"gave no sign of life for {self._config.node_timeout:g} s"
        except (EOFError, OSError, ValueError, TypeError):
            pass
        with self._lock:
            early = not self._complete
            left = early and self._members.pop(node, None) is not None
        if left:
            logger.warning("a node left before all had joined", extra={"node": node, "how": how})
            member.close()
        if early:
            return
        self.fail(f"node {node} {how}")
        self._on_lost(node, how)

    def _want_drain(self, node: int) -> None:
        logger.info("a node ends, so the engine drains", extra={"node": node})
        with self._lock:
            self._drain_wanted = True
            callback = self._on_drain
        if callback is not None:
            callback()

    def _tell(self, message: Mapping[str, Any]) -> None:
        with self._lock:  # a member of the table is open
            for member in self._members.values():
                with suppress(OSError):
                    member.control.send_bytes(json.dumps(message).encode())


def plain_address(address: str) -> str:
    """An IPv4 address that a socket for both versions shows as one of IPv6, in its usual form."""
    try:
        mapped = getattr(ipaddress.ip_address(address), "ipv4_mapped", None)
    except ValueError:  # an address with a zone
        return address
    return address if mapped is None else str(mapped)


def _listen(address: str, port: int) -> socket.socket:
    """Listens on all interfaces, or on loopback only if the nodes are on one machine."""
    try:
        if _loopback(address):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(f"master_port {port} cannot be opened: {error}") from error


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
