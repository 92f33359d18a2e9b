"""A node other than node 0: it joins, starts its ranks, and ends when the engine ends.

It has no queue, scheduler or requests. Whatever ends the engine ends it too: a rank or a node that
is lost, or a stop that node 0 has announced.
"""

import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from ..core.config import EngineConfig
from ..core.errors import ConfigError, RankFailed
from .handshake import Fields, Greeting, HandshakeFailed, WrongSecret, read_secret
from .loader import divided
from .node_greeting import NodeGreeting
from .process import RankProcess
from .remote_nodes import LINKS, LOG_INTERVAL, MAX_MESSAGE, plain_address

logger = logging.getLogger(__name__)

# Seconds to connect to node 0, and between two attempts.
CONNECT_TIMEOUT, RETRY = 5.0, 0.5
# Seconds for ranks to end by themselves after a stop, and for the stop after they have ended.
GRACE = 10.0

Event = Mapping[str, Any]


class _NotYet(Exception):
    """Node 0 cannot be reached, or cannot take this node now."""


class RankNode:
    """The ranks of one node. `serve` runs in the main thread, once."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError or CheckpointError for what this node cannot run."""
        self._config, device = divided(config)
        self._secret = read_secret(config.node_secret_file)
        self._greeting = NodeGreeting.of(self._config, device, "")
        self._stopped = False
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._state: str | None = "waiting for node 0"
        self._ranks: list[RankProcess] = []

    def not_ready(self) -> str | None:
        """The reason why the node's ranks do not serve, or None. Callable from any thread."""
        return self._state

    def drain(self) -> None:
        """Asks node 0 to drain and stop the engine. Callable from a signal handler."""
        self._state = "draining"
        self._events.put({"drain": True})

    def serve(self, on_connected: Callable[[], None]) -> None:
        """Runs the ranks until node 0 stops them. `on_connected` is called once all ranks of the
        engine are connected. Raises ConfigError if node 0 refuses this node, RankFailed if the
        engine fails."""
        with ExitStack() as opened:
            control, links = self._join()
            opened.callback(control.close)
            self._state = "starting"
            opened.callback(self._end_ranks)
            for rank, ends in links.items():
                size = self._config.tensor_parallel_size
                self._ranks.append(RankProcess(rank, size, self._rank_ended, ends))
            Thread(target=self._read, args=(control,), name="node-0", daemon=True).start()
            self._until_stop(control, on_connected)
            self._stopped = True

    def _until_stop(self, control: Connection, on_connected: Callable[[], None]) -> None:
        while "stop" not in (event := self._events.get()):
            if "failed" in event:
                raise RankFailed(str(event["failed"]))
            if "broken" in event:
                _tell(control, {"failed": event["broken"]})
                raise RankFailed(event["broken"])
            if "ended" in event:
                self._await_stop()
                return
            if "drain" in event:
                _tell(control, {"drain": True})
            else:
                self._state = None
                on_connected()

    def _await_stop(self) -> None:
        """A rank has ended without an error, so node 0 has stopped the engine, or is gone."""
        deadline = time.monotonic() + GRACE
        while (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                event = self._events.get(timeout=left)
                if "stop" in event:
                    return
                if "failed" in event:
                    raise RankFailed(str(event["failed"]))
        raise RankFailed("a rank of this node ended, and node 0 has not stopped the engine")

    def _rank_ended(self, rank: int, how: str) -> None:
        clean = any(one.rank == rank and one.exit_code == 0 for one in self._ranks)
        problem = f"rank {rank} of the engine {how}; its log says why"
        self._events.put({"ended": rank} if clean else {"broken": problem})

    def _end_ranks(self) -> None:
        deadline = time.monotonic() + GRACE
        for rank in self._ranks:
            rank.end(max(0.0, deadline - time.monotonic()) if self._stopped else 0.0)

    def _read(self, control: Connection) -> None:
        """Passes on what node 0 says, until its end."""
        how = "is gone: its connection ended"
        try:
            while True:
                self._events.put(json.loads(control.recv_bytes(MAX_MESSAGE)))
        except TimeoutError:
            how = f"gave no sign of life for {self._config.node_timeout:g} s"
        except (EOFError, OSError, ValueError):
            pass
        self._events.put({"failed": f"node 0 {how}"})

    def _join(self) -> tuple[Connection, dict[int, tuple[Connection, ...]]]:
        """Joins node 0 as soon as it can; waits without a limit. Raises ConfigError."""
        log_at = time.monotonic()
        where = f"{self._config.master_addr}:{self._config.master_port}"
        while True:
            try:
                return self._joined()
            except _NotYet as reason:
                if time.monotonic() >= log_at:
                    extra = {"address": where, "reason": str(reason)}
                    logger.info("waiting for node 0", extra=extra)
                    log_at = time.monotonic() + LOG_INTERVAL
                time.sleep(RETRY)
            except WrongSecret as error:
                raise ConfigError(f"node 0 at {where} was refused: {error}") from error

    def _joined(self) -> tuple[Connection, dict[int, tuple[Connection, ...]]]:
        size, node = self._config.ranks_per_node, self._config.node_rank
        with ExitStack() as failed:
            reply, control = self._connect(None)
            failed.callback(control.close)
            links: dict[int, tuple[Connection, ...]] = {}
            for rank in range(node * size, (node + 1) * size):
                ends = []
                for kind in LINKS:
                    content = {"token": reply["token"], "kind": kind, "rank": rank}
                    ends.append(self._connect(content)[1])
                    failed.callback(ends[-1].close)
                links[rank] = tuple(ends)
            failed.pop_all()
        logger.info("joined node 0", extra={"node": node, "ranks": list(links)})
        return control, links

    def _connect(self, content: Fields | None) -> tuple[Fields, Connection]:
        """Greets node 0: with the node's greeting, or with `content` for a rank."""
        address = (self._config.master_addr, self._config.master_port)
        try:
            sock = socket.create_connection(address, CONNECT_TIMEOUT)
            with sock:
                greeting = Greeting(sock, self._secret)
                if content is None:
                    own = plain_address(sock.getsockname()[0])
                    content = asdict(replace(self._greeting, address=own))
                reply = greeting.introduce(content)
                if reply.get("problem") and not reply.get("retry"):
                    raise ConfigError(f"node 0 refuses this node: {reply['problem']}")
                if reply.get("problem"):
                    raise _NotYet(str(reply["problem"]))
                return reply, greeting.finish(self._config.node_timeout)
        except WrongSecret:
            raise
        except (HandshakeFailed, OSError) as error:
            raise _NotYet(f"it cannot be reached: {error}") from error


def _tell(control: Connection, event: Event) -> None:
    with suppress(OSError):
        control.send_bytes(json.dumps(event).encode())
