"""Real Valkeys that work together: a master with a replica and Sentinel, and a cluster."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from headrace_testing.valkey import ValkeyServer, free_port, require_server

MASTER = "main"
_LIMIT_S = 60.0


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass  # not started yet, or between two states
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {_LIMIT_S:.0f} s: {what}")
        time.sleep(0.01)


def ask(port: int, *command: str | int) -> Any:
    """Sends one command to one server; returns the reply in RESP2's form."""
    with redis.Redis(port=port, protocol=2, decode_responses=True) as client:
        return client.execute_command(*command)


class SentinelSet:
    """A master, its replica, and a Sentinel, which calls a server down after `down_after_s`."""

    def __init__(self, folder: Path, down_after_s: float = 1.0) -> None:
        self._folder = folder
        self._down_after_ms = round(down_after_s * 1000)
        self.port = free_port()
        self.master = ValkeyServer(folder / "a", appendonly=False)
        self.replica = ValkeyServer(
            folder / "b", "--replicaof", "127.0.0.1", str(self.master.port), appendonly=False
        )
        self._sentinel: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """A URL that names an unreachable Sentinel before the real one."""
        return f"redis+sentinel://127.0.0.1:1,127.0.0.1:{self.port}/{MASTER}/0"

    def start(self) -> None:
        self.master.start()
        ask(self.master.port, "CONFIG", "SET", "repl-diskless-sync-delay", 0)
        self.replica.start()
        _until(lambda: self._synced(self.replica), "the replica to be in sync")
        self._start_sentinel()
        _until(lambda: len(ask(self.port, "SENTINEL", "REPLICAS", MASTER)) == 1, "Sentinel")

    @staticmethod
    def _synced(server: ValkeyServer) -> bool:
        return bool(ask(server.port, "INFO", "replication")["master_link_status"] == "up")

    def _start_sentinel(self) -> None:
        config = self._folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self._folder}\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {self.master.port} 1\n"
            f"sentinel down-after-milliseconds {MASTER} {self._down_after_ms}\n"
            f"sentinel failover-timeout {MASTER} 3000\n"
        )
        command = [require_server(), str(config), "--sentinel"]
        with (self._folder / "sentinel.log").open("ab") as log:
            self._sentinel = subprocess.Popen(command, stdout=log, stderr=log)

    def fail_over(self) -> None:
        """Demotes the master, which stays reachable. Sentinel itself would do it 10 s later."""
        _until(self._begin_failover, "the replica to be fit for a failover")
        self.until_promoted()
        ask(self.master.port, "REPLICAOF", "127.0.0.1", self.replica.port)

    def _begin_failover(self) -> bool:
        """Asks for a failover. A Sentinel that has not heard from the replica lately refuses it."""
        return bool(ask(self.port, "SENTINEL", "FAILOVER", MASTER) == "OK")

    def cut_replica_off(self) -> None:
        """Cuts the replica off from its master until unpause()."""
        self.replica.pause()
        ask(self.master.port, "CLIENT", "KILL", "TYPE", "replica")

    def until_promoted(self) -> None:
        expected = ["127.0.0.1", str(self.replica.port)]
        _until(
            lambda: ask(self.port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER) == expected,
            "the replica to be master",
        )

    def stop(self) -> None:
        if self._sentinel is not None:
            self._sentinel.kill()
            self._sentinel.wait()
        self.master.stop()
        self.replica.stop()


class GuardedSentinelSet(SentinelSet):
    """Masters that accept writes only while they have a replica.

    A second replica is never promoted, so that a new master has a replica too.
    """

    def __init__(self, folder: Path, down_after_s: float = 1.0) -> None:
        super().__init__(folder, down_after_s)
        self.second = ValkeyServer(
            folder / "c",
            *("--replicaof", "127.0.0.1", str(self.master.port), "--replica-priority", "0"),
            appendonly=False,
        )

    def start(self) -> None:
        super().start()
        self.second.start()
        _until(lambda: self._synced(self.second), "the second replica to be in sync")
        _until(lambda: len(ask(self.port, "SENTINEL", "REPLICAS", MASTER)) == 2, "Sentinel")
        for server in (self.master, self.replica):
            ask(server.port, "CONFIG", "SET", "min-replicas-to-write", 1)
            ask(server.port, "CONFIG", "SET", "min-replicas-max-lag", 3)

    def stop(self) -> None:
        super().stop()
        self.second.stop()


class ClusterSet:
    """Three masters; each of the first `replicas` of them has a replica."""

    def __init__(self, folder: Path, replicas: int = 1) -> None:
        self._bus_ports = [free_port() for _ in range(3 + replicas)]
        self.nodes = [self._node(folder / str(bus), bus) for bus in self._bus_ports]
        self.masters, self.replicas = self.nodes[:3], self.nodes[3:]
        self.replica = self.replicas[0]

    @staticmethod
    def _node(folder: Path, bus_port: int) -> ValkeyServer:
        options = ["--cluster-enabled", "yes", "--cluster-port", str(bus_port)]
        options += ["--cluster-node-timeout", "600", "--cluster-require-full-coverage", "no"]
        options += ["--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0"]
        return ValkeyServer(folder, *options, appendonly=False)

    @property
    def url(self) -> str:
        """Names one node; the others are found."""
        return f"redis+cluster://127.0.0.1:1,127.0.0.1:{self.masters[1].port}"

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        self._share_slots()
        for node, bus in zip(self.nodes[1:], self._bus_ports[1:], strict=True):
            ask(self.nodes[0].port, "CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        _until(lambda: all(map(self._knows_all, self.nodes)), "the nodes to meet")
        for master, replica in zip(self.masters, self.replicas, strict=False):
            ask(replica.port, "CLUSTER", "REPLICATE", ask(master.port, "CLUSTER", "MYID"))
        _until(self._complete, "the cluster to be complete")

    def _share_slots(self) -> None:
        bounds = [0, 5461, 10923, 16384]
        for number, node in enumerate(self.masters):
            ask(node.port, "CONFIG", "SET", "cluster-announce-ip", "127.0.0.1")
            ask(node.port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            ask(node.port, "CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)

    def _knows_all(self, node: ValkeyServer) -> bool:
        info = ask(node.port, "CLUSTER INFO")
        known = info["cluster_known_nodes"] == str(len(self.nodes))
        return bool(known and info["cluster_state"] == "ok")

    def _complete(self) -> bool:
        """Whether every node knows all slots, and all replicas have their master's data."""
        links = [ask(replica.port, "INFO", "replication") for replica in self.replicas]
        return all(link.get("master_link_status") == "up" for link in links) and all(
            len(self.owners(node)) == 3 and self._replicas(node) == len(self.replicas)
            for node in self.nodes
        )

    @staticmethod
    def _replicas(node: ValkeyServer) -> int:
        return sum(len(part) - 3 for part in _slots(node))

    @staticmethod
    def owners(node: ValkeyServer) -> list[int]:
        """The ports of the masters in the order of their slots, as one node reports them."""
        return [part[2][1] for part in sorted(_slots(node))]

    def owner(self, slot: int) -> ValkeyServer:
        port = next(part[2][1] for part in _slots(self.masters[1]) if part[0] <= slot <= part[1])
        return next(node for node in self.nodes if node.port == port)

    def until_promoted(self) -> None:
        rest = [*self.masters[1:], self.replica]
        _until(
            lambda: all(self.replica.port in self.owners(node) for node in rest),
            "the replica to be master",
        )

    def until_whole(self) -> None:
        """Waits until all nodes see all others."""
        _until(lambda: all(map(self._knows_all, self.nodes)), "the cluster to be whole")

    def until_healed(self) -> None:
        """Waits until the first master is back, as the replica of its successor."""
        back = self.masters[0]

        def healed() -> bool:
            link = ask(back.port, "INFO", "replication").get("master_link_status")
            return link == "up" and all(map(self._knows_all, self.nodes))

        _until(healed, "the cluster to heal")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


def _slots(node: ValkeyServer) -> list[Any]:
    with redis.Redis(port=node.port, protocol=2, decode_responses=True) as client:
        client.response_callbacks.clear()
        found: list[Any] = client.execute_command("CLUSTER SLOTS")
        return found
