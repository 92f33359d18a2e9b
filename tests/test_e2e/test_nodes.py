"""An engine whose ranks are on two nodes, as real processes: they join in any order, and the end of
one ends the other; streams continue once the nodes are back."""

import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace_common.config.process import EXIT_CONFIG, EXIT_FAILED
from headrace_testing.forked import Forge
from headrace_testing.greedy import GreedyCase, clear_cases
from headrace_testing.needs import missing
from headrace_testing.pids import alive
from headrace_testing.processes import Running, Starter, until
from headrace_testing.stack import EngineProcess, Stack
from headrace_testing.streams import Crowd
from headrace_testing.valkey import free_port

pytestmark = pytest.mark.timeout(900)  # the nodes of one test are started four times

STREAMS, TOKENS = 4, 120
# Seconds without a sign of life until a node is lost.
TIMEOUT = 3
CLONE_NEWNET = 0x40000000


class Nodes:
    """The nodes of one engine, each started and ended on its own, and a gateway."""

    def __init__(
        self, stack: Stack, size: int, host: str = "127.0.0.1", start: Starter | None = None
    ) -> None:
        """`start` starts node 1, which is the first to be there."""
        self.stack = stack
        self._flags = (
            *("--nnodes", "2", "--tensor-parallel-size", str(size), "--drain-timeout", "0"),
            *("--master-addr", host, "--master-port", str(free_port())),
            *("--node-timeout", str(TIMEOUT)),
        )
        self.gateway = stack.add_gateway()
        self.engine = self.other = self.start(1, start=start)

    def start(self, rank: int, *flags: str, start: Starter | None = None) -> EngineProcess:
        """Starts a node; the last one of each rank is `engine` or `other`."""
        own = ("--node-rank", str(rank), *flags)
        process = self.stack.add_engine(*self._flags, *own, start=start)
        if rank == 0:
            self.engine = process
        else:
            self.other = process
        return process

    def until_ready(self) -> None:
        self.engine.await_log("engine ready")
        self.other.await_log("node ready")
        until(lambda: self.gateway.ready, "the gateway to be ready")

    def ends(self) -> tuple[int, int]:
        """The exit status of both nodes."""
        return self.engine.wait(), self.other.wait()


@pytest.fixture(scope="module")
def start(start: Starter) -> Starter:
    """Starts engines that fork their ranks, too."""
    return Forge("headrace_testing.forked_ranks").start


@pytest.fixture(scope="module")
def short_cases(checkpoint: Path) -> list[GreedyCase]:
    return clear_cases(checkpoint, STREAMS, TOKENS)


@pytest.fixture
def nodes(checkpoint: Path, tmp_path: Path, start: Starter) -> Iterator[Callable[[int], Nodes]]:
    stacks: list[Stack] = []

    def make(size: int) -> Nodes:
        stacks.append(Stack(checkpoint, tmp_path, start=start))
        return Nodes(stacks[0], size)

    yield make
    for stack in stacks:
        stack.close()


def health(process: EngineProcess, check: str) -> str:
    """The answer of a probe, which is an error unless it is ok."""
    url = f"http://127.0.0.1:{process.metrics_port}/health/{check}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read().decode().strip())
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode().strip()


async def stream(nodes: Nodes, cases: Sequence[GreedyCase], meanwhile: Callable[[], None]) -> None:
    """Streams the cases; `meanwhile` runs once each has tokens, and must not change any."""
    crowd = Crowd([nodes.gateway.url], cases)
    running = asyncio.create_task(crowd.run())

    def interrupt() -> None:
        until(lambda: all(one.token_ids for one in crowd.received), "each stream to have a token")
        meanwhile()

    await asyncio.to_thread(interrupt)
    await running
    assert crowd.mistakes() == []


def test_two_nodes_of_two_ranks_are_one_engine(
    nodes: Callable[[int], Nodes], short_cases: list[GreedyCase]
) -> None:
    """Nodes join in any order, and SIGTERM at the engine ends both without an error."""
    group = nodes(4)
    group.other.await_log("waiting for node 0")
    assert health(group.other, "live") == "ok"
    assert health(group.other, "ready") == "waiting for node 0"
    group.start(0)
    group.until_ready()
    assert health(group.other, "ready") == "ok"
    joined = group.other.logged("joined node 0")
    assert joined is not None and joined["ranks"] == [2, 3]
    logged = {entry.get("rank") for entry in group.other.log_entries()}
    assert logged == {None, 2, 3}, "ranks log on their own node"
    asyncio.run(stream(group, short_cases, lambda: None))
    group.engine.signal(signal.SIGTERM)
    assert group.ends() == (0, 0)


def test_a_lost_node_ends_the_engine_and_streams_continue_once_it_is_back(
    nodes: Callable[[int], Nodes], short_cases: list[GreedyCase]
) -> None:
    group = nodes(2)
    group.start(0)
    group.until_ready()

    def lose_other() -> None:
        ranks = children(group.other.pid)
        group.other.signal(signal.SIGKILL)
        assert group.ends() == (EXIT_FAILED, -signal.SIGKILL)
        until(lambda: not any(map(alive, ranks)), "the end of its ranks")
        lost = group.engine.log_entries()[-1]
        assert "node 1 of the engine is gone: its connection ended" in str(lost["error"])
        group.start(0)
        group.start(1)
        group.until_ready()

    asyncio.run(stream(group, short_cases, lose_other))

    def lose_engine() -> None:
        group.engine.signal(signal.SIGKILL)
        assert group.ends() == (-signal.SIGKILL, EXIT_FAILED)
        assert "node 0 is gone" in str(group.other.log_entries()[-1]["error"])
        group.start(1)
        group.start(0)
        group.until_ready()

    asyncio.run(stream(group, short_cases, lose_engine))

    def end_other() -> None:
        """The engine hands its requests back before the node is gone."""
        group.other.signal(signal.SIGTERM)
        assert group.ends() == (0, 0)
        assert drained(group.engine) == STREAMS
        group.start(1)
        group.start(0)
        group.until_ready()

    asyncio.run(stream(group, short_cases, end_other))

    (rank,) = children(group.other.pid)
    os.kill(rank, signal.SIGKILL)
    assert group.ends() == (EXIT_FAILED, EXIT_FAILED)
    for node in (group.engine, group.other):
        assert "rank 1 of the engine was killed by signal 9" in node.log.read_text()


def drained(engine: EngineProcess) -> object:
    """The number of requests that an engine has given back, by its log."""
    (entry,) = (one for one in engine.log_entries() if one["message"] == "drained")
    return entry["given_back"]


def children(pid: int) -> list[int]:
    """The processes that a process has started, from any of its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_a_node_with_other_settings_does_not_join(nodes: Callable[[int], Nodes]) -> None:
    group = nodes(2)
    group.start(0, "--block-size", "32")
    assert group.other.wait() == EXIT_CONFIG
    words = "block_size is 32 on node 0 and 16 on node 1"
    assert words in str(group.other.log_entries()[-1]["error"])
    group.engine.await_log("a node was refused")
    group.start(1, "--block-size", "32")
    group.until_ready()


def test_a_host_that_cannot_be_reached_is_lost(
    checkpoint: Path, tmp_path: Path, short_cases: list[GreedyCase]
) -> None:
    """Node 1 has a network of its own, whose cable is pulled."""
    with network() as cable:
        stack = Stack(checkpoint, tmp_path)
        try:
            group = Nodes(stack, 2, cable.address, cable.start)
            group.start(0)
            group.until_ready()
            asyncio.run(stream(group, short_cases, lambda: None))
            cable.pull()
            assert group.ends() == (EXIT_FAILED, EXIT_FAILED)
            for node, other in ((group.engine, 1), (group.other, 0)):
                error = str(node.log_entries()[-1]["error"])
                assert f"node {other}" in error and "gave no sign of life for 3 s" in error
        finally:
            stack.close()


class Network:
    """Two network namespaces with an address each, joined by a pair of virtual interfaces."""

    address = "10.0.0.1"

    def __init__(self, name: str) -> None:
        self.here, self._there = f"{name}a", f"{name}b"

    def open(self) -> None:
        for name in (self.here, self._there):
            ip("netns", "add", name)
        pair = ("link", "add", "cable", "type", "veth", "peer", "name", "cable")
        ip("-n", self.here, *pair, "netns", self._there)
        for name, address in ((self.here, self.address), (self._there, "10.0.0.2")):
            ip("-n", name, "address", "add", f"{address}/30", "dev", "cable")
            for interface in ("lo", "cable"):
                ip("-n", name, "link", "set", interface, "up")

    def start(
        self, module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> Running:
        """Starts `python -m module arguments` at the far end."""
        command = ["ip", "netns", "exec", self._there, sys.executable, "-m", module, *arguments]
        with log.open("ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=dict(env))

    def pull(self) -> None:
        ip("-n", self.here, "link", "set", "cable", "down")

    def close(self) -> None:
        for name in (self.here, self._there):
            ip("netns", "delete", name)


@contextmanager
def network() -> Iterator[Network]:
    """This thread, and what it starts, is at the near end. In the network of all tests, a new
    interface would make browsers give up requests (ERR_NETWORK_CHANGED)."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        missing("iproute2 as root")
    made = Network(f"hr{os.getpid()}")
    try:
        made.open()
        with open("/proc/thread-self/ns/net") as before:
            enter(f"/run/netns/{made.here}")
            try:
                yield made
            finally:
                enter(f"/proc/self/fd/{before.fileno()}")
    finally:
        made.close()


def enter(namespace: str) -> None:
    """Moves this thread to a network namespace; Python has os.setns from 3.12 on."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", namespace)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=60)
