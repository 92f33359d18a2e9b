"""Gateways and engines over one kind of Redis, disturbed by one fault after the other."""

import itertools
import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import redis

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.ledger import UsageEntry, UsageOutcome, read_entry
from headrace_common.wire.keys import ShardKeys
from headrace_testing.processes import Starter, until
from headrace_testing.redis_sets import ClusterSet, SentinelSet
from headrace_testing.stack import MODEL, EngineProcess, RedisServers, Stack
from headrace_testing.valkey import ValkeyServer

from .proxy import FaultProxy

ENGINES = GATEWAYS = 2
SHARDS = 3  # at most
_FLAGS = ("--lease", "1.5", "--beat-interval", "0.3")
# Every second engine proposes tokens, which changes no answer.
_SPECULATION = ("--speculative-config", json.dumps({"method": "ngram", "prompt_lookup_min": 1}))
# Longer than any fault freezes a gateway: one that lives is not given up.
GATEWAY_FLAGS = ("--lease", "6")
_QUIET_S = 60.0


class ProxiedServer:
    """A server that gateways and engines reach only through a FaultProxy."""

    def __init__(self, folder: Path) -> None:
        self.server = ValkeyServer(folder)
        self.proxy = FaultProxy(self.server.port)

    @property
    def url(self) -> str:
        return self.server.url

    def start(self) -> None:
        self.server.start()
        self.proxy.start()

    def stop(self) -> None:
        self.proxy.stop()
        self.server.stop()


class WholeCluster(ClusterSet):
    """Three masters with a replica each; its URL names every node, since any may be lost."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, replicas=3)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)


class World(Stack):
    """The stack that faults disturb. Between faults it has the engines and gateways that the
    constants say, and an empty queue with `shards` shards.
    """

    def __init__(
        self, checkpoint: Path, folder: Path, start: Starter, servers: RedisServers, shards: int
    ) -> None:
        super().__init__(checkpoint, folder, servers=servers, start=start, queue_shards=shards)
        self.folder = folder
        self._kinds = cycle([(), _SPECULATION])
        if isinstance(servers, ProxiedServer):
            self.redis_url = f"redis://127.0.0.1:{servers.proxy.port}/0"

    @property
    def proxy(self) -> FaultProxy:
        assert isinstance(self.servers, ProxiedServer)
        return self.servers.proxy

    @property
    def sentinel_set(self) -> SentinelSet:
        assert isinstance(self.servers, SentinelSet)
        return self.servers

    @property
    def cluster_set(self) -> ClusterSet:
        assert isinstance(self.servers, ClusterSet)
        return self.servers

    @property
    def urls(self) -> Sequence[str]:
        return [gateway.url for gateway in self.gateways]

    def spawn(self, *flags: str, env: Mapping[str, str] | None = None) -> EngineProcess:
        return self.add_engine(*_FLAGS, *next(self._kinds), *flags, env=env)

    def restore(self) -> None:
        """Replaces processes that have died and ends surplus engines."""
        self.engines[:] = [engine for engine in self.engines if engine.alive]
        self.gateways[:] = [gateway for gateway in self.gateways if gateway.alive]
        for engine in self.engines[ENGINES:]:
            self.retire(engine)
        for _ in range(ENGINES - len(self.engines)):
            self.spawn()
        for _ in range(GATEWAYS - len(self.gateways)):
            self.add_gateway(*GATEWAY_FLAGS)
        self.await_engines(ENGINES)

    def queue_is_empty(self) -> bool:
        try:
            return super().queue_is_empty()
        except BackendUnavailable:
            return False

    def until_clean(self) -> None:
        """Waits until no request is left; raises AssertionError naming what is left."""
        until(self.queue_is_empty, "the queue to be empty", _QUIET_S)
        for engine in self.engines:
            if engine.alive:
                engine.await_log("engine ready")
                until(lambda e=engine: e.idle, f"{engine.name} to be idle", _QUIET_S)  # type: ignore[misc]
        if self.is_one_server:
            until(lambda: self.leftovers() == [], "no entry and no prompt in Redis", _QUIET_S)

    @property
    def shard_keys(self) -> Sequence[ShardKeys]:
        return [ShardKeys(MODEL, number) for number in range(self.queue_shards)]

    def leftovers(self) -> list[str]:
        """Keys of requests that have not ended; payloads of dead letters are left out."""
        with redis.Redis.from_url(self.servers.url, decode_responses=True) as client:
            return [name for names in self.shard_keys for name in _left(client, names)]

    @property
    def is_one_server(self) -> bool:
        """Whether one server has everything: it loses nothing unless a fault makes it."""
        return isinstance(self.servers, ValkeyServer | ProxiedServer)

    def entered(self) -> dict[str, tuple[int, int]]:
        """The prompt and output tokens of finished requests in the ledger, by clients' ids."""
        found: dict[str, list[UsageEntry]] = {}
        with redis.Redis.from_url(self.servers.url) as client:
            pages: list[Any] = [client.xrange(names.ledger) for names in self.shard_keys]
        for stream_id, fields in itertools.chain(*pages):
            entry = read_entry(MODEL, stream_id, fields)
            found.setdefault(entry.request_id, []).append(entry)
        return {
            _known_as(rid): (
                sum(entry.prompt_tokens for entry in entries),
                sum(entry.output_tokens for entry in entries),
            )
            for rid, entries in found.items()
            if entries[-1].outcome is UsageOutcome.FINISHED
        }

    def dead_letters(self) -> int:
        with redis.Redis.from_url(self.servers.url) as client:
            counts: list[Any] = [client.xlen(names.dead_letters) for names in self.shard_keys]
        return sum(counts)


def _known_as(request_id: str) -> str:
    """The id that clients know: a stored request's is a part of its id in the queue."""
    parts = request_id.split(".")
    return parts[1] if len(parts) == 3 else request_id


def _left(client: redis.Redis, names: ShardKeys) -> list[str]:
    dead: Any = client.xrange(names.dead_letters)
    kept = {names.payload(fields["r"]) for _, fields in dead}
    queues = [queue for queue in names.queues if client.xlen(queue)]
    return [*queues, *(set(client.scan_iter(f"{names.payloads}*", 10_000)) - kept)]
