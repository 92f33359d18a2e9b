"""How nodes join node 0, what is refused by name, and what strangers on its port can do: nothing.

Nodes are threads and bare connections here; `test_e2e/test_nodes.py` has them as processes.
"""

import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
import torch.distributed as dist

from headrace_engine.core.config import EngineConfig
from headrace_engine.core.errors import ConfigError
from headrace_engine.distributed import remote_nodes
from headrace_engine.distributed.group import interface_of
from headrace_engine.distributed.handshake import Greeting, HandshakeFailed
from headrace_engine.distributed.node_greeting import NodeGreeting
from headrace_engine.distributed.rank_node import RankNode
from headrace_engine.distributed.remote_nodes import MAX_GREETINGS, RemoteNodes
from headrace_engine.distributed.remote_store import RemoteStore, serve_store
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.engines import engine_config
from headrace_testing.processes import until
from headrace_testing.valkey import free_port

CheckpointMaker = Callable[[str], Path]
LIMIT_S = 60.0
SECRET = b"correct horse"


@pytest.fixture
def config(checkpoint: CheckpointMaker) -> EngineConfig:
    options = {"tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    return engine_config(checkpoint("llama"), **options)


def node(config: EngineConfig, rank: int = 1, **changes: Any) -> EngineConfig:
    """The configuration of another node, which differs from node 0's in `changes`."""
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return EngineConfig(**{**fields, "node_rank": rank, **changes})


class Zero:
    """Node 0, which waits for the others in a thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.lost: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self.nodes = RemoteNodes(config, "cpu", lambda node, how: self.lost.put((node, how)))
        self._thread = Thread(target=self._gather)
        self._thread.start()

    def _gather(self) -> None:
        with suppress(OSError):  # the port is closed at a test's end
            self.nodes.gather()

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self.nodes.close()
        self._thread.join()


@contextmanager
def node_0(config: EngineConfig) -> Iterator[Zero]:
    zero = Zero(config)
    try:
        yield zero
    finally:
        zero.close()


def greet(
    config: EngineConfig, content: Mapping[str, Any], secret: bytes = b""
) -> tuple[Mapping[str, Any], Connection]:
    """The reply of node 0 to a connection that says `content`, and the connection."""
    with socket.create_connection(("127.0.0.1", config.master_port), LIMIT_S) as sock:
        greeting = Greeting(sock, secret, LIMIT_S)
        return greeting.introduce(content), greeting.finish(LIMIT_S)


def introduction(config: EngineConfig) -> dict[str, Any]:
    greeting = NodeGreeting.of(config, "cpu", "127.0.0.1")
    names = ("node", "address", "own", "shared")
    return {name: getattr(greeting, name) for name in names}


def join(config: EngineConfig, opened: ExitStack, secret: bytes = b"") -> Connection:
    """Joins as node 1 with its connections; returns the node's own."""
    reply, control = greet(config, introduction(node(config)), secret)
    opened.callback(control.close)
    if "problem" in reply:
        raise HandshakeFailed(reply["problem"])
    for kind in ("commands", "store"):
        link = {"token": reply["token"], "kind": kind, "rank": 1}
        opened.callback(greet(config, link, secret)[1].close)
    return control


def serve(config: EngineConfig) -> None:
    RankNode(config).serve(lambda: pytest.fail("the node was accepted"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'float32' on node 0 and 'bfloat16' on node 1"),
        ({"block_size": 8}, "block_size is 4 on node 0 and 8 on node 1"),
        ({"num_blocks": None}, "num_blocks is 512 on node 0 and None on node 1"),
        (
            {"nnodes": 3, "tensor_parallel_size": 3, "node_rank": 2},
            "node_rank 2 is not below node 0's nnodes, 2",
        ),
    ],
)
def test_a_node_with_other_settings_is_refused_by_name(
    changes: dict[str, Any], words: str, config: EngineConfig
) -> None:
    with node_0(config) as zero:
        with pytest.raises(ConfigError, match=words):
            serve(node(config, **changes))
        assert zero.waits


def test_a_node_with_another_model_is_refused(config: EngineConfig, tmp_path: Path) -> None:
    """Of the same shape and size; only weights differ."""
    other = save_checkpoint(tmp_path, "llama")
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    words = "node 0 and node 1 have different checkpoints"
    with node_0(config), pytest.raises(ConfigError, match=words):
        serve(node(config, model=str(other)))


def test_what_belongs_to_one_node_may_differ(config: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "copy").symlink_to(config.model)
    own: dict[str, Any] = {"model": str(tmp_path / "copy"), "threads": 3, "policy": "priority"}
    with node_0(config) as zero, ExitStack() as opened:
        reply, control = greet(config, introduction(node(config, **own)))
        opened.callback(control.close)
        assert "token" in reply and zero.waits


@pytest.mark.parametrize("theirs", [b"wrong horse", None])
def test_a_node_without_the_secret_is_refused(
    theirs: bytes | None, config: EngineConfig, tmp_path: Path
) -> None:
    files = {name: tmp_path / name for name in ("ours", "theirs")}
    files["ours"].write_bytes(SECRET + b"\n")
    files["theirs"].write_bytes(theirs or b"")
    config = node(config, 0, node_secret_file=str(files["ours"]))
    wrong = None if theirs is None else str(files["theirs"])
    with node_0(config) as zero, ExitStack() as opened:
        with pytest.raises(ConfigError, match="its node_secret_file has another content"):
            serve(node(config, node_secret_file=wrong))
        join(config, opened, SECRET)
        until(lambda: not zero.waits, "the node that knows the secret to join")


def test_node_0_does_not_believe_a_proof_without_the_secret(
    config: EngineConfig, tmp_path: Path
) -> None:
    """The node sends node 0's own proof back."""
    (tmp_path / "secret").write_bytes(SECRET)
    config = node(config, 0, node_secret_file=str(tmp_path / "secret"))
    with node_0(config) as zero, ExitStack() as opened:
        sock = opened.enter_context(
            socket.create_connection(("127.0.0.1", config.master_port), LIMIT_S)
        )
        liar = Greeting(sock, SECRET, LIMIT_S)
        liar.send({"protocol": "headrace-nodes-1", "nonce": "0"})
        proof = liar._receive()["proof"]
        liar.send({"content": json.dumps(introduction(node(config))), "proof": proof})
        assert sock.recv(1) == b""
        assert zero.waits


@pytest.mark.parametrize("file", ["absent", "empty"])
def test_a_secret_that_cannot_be_read_is_named(
    file: str, config: EngineConfig, tmp_path: Path
) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=f"node_secret_file: .*{file} (cannot be read|is empty)"):
        serve(node(config, node_secret_file=str(tmp_path / file)))


def test_strangers_delay_nobody(config: EngineConfig) -> None:
    """As many as may greet at once, less one, say nothing or something else."""
    sayings = (
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!i", -1),
        struct.pack("!i", 2**30),
        struct.pack("!i", 2) + b"{}",
        struct.pack("!i", 4) + b"[[[[",
        struct.pack("!i", 8) + b"{",
    )
    with node_0(config) as zero, ExitStack() as opened:
        for index in range(MAX_GREETINGS - 1):
            connection = socket.create_connection(("127.0.0.1", config.master_port), LIMIT_S)
            opened.enter_context(connection).sendall(sayings[index % len(sayings)])
            if index % 3 == 0:
                connection.close()
        for content in ({}, {"token": "0" * 64, "kind": "commands", "rank": 1}, {"node": "1"}):
            with pytest.raises(HandshakeFailed, match="closed the connection"):
                greet(config, content)
        assert zero.waits
        join(config, opened)
        until(lambda: not zero.waits, "the node to join")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", config.master_port), LIMIT_S)


def test_a_slow_greeting_is_cut_off(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are taken by strangers that never finish; the node joins once they are gone."""
    monkeypatch.setattr(
        remote_nodes, "Greeting", lambda sock, secret: Greeting(sock, secret, timeout=0.5)
    )
    with node_0(config) as zero, ExitStack() as opened:
        for _ in range(MAX_GREETINGS):
            connection = socket.create_connection(("127.0.0.1", config.master_port), LIMIT_S)
            opened.enter_context(connection).sendall(struct.pack("!i", 9))
        until(lambda: joins(config, opened), "a free place")
        until(lambda: not zero.waits, "the node to join")


def joins(config: EngineConfig, opened: ExitStack) -> bool:
    try:
        join(config, opened)
    except (HandshakeFailed, OSError):
        return False
    return True


def test_a_second_node_of_the_same_number_waits_until_the_first_is_gone(
    config: EngineConfig,
) -> None:
    content = introduction(node(config))
    with node_0(config) as zero, ExitStack() as opened:
        reply, first = greet(config, content)
        assert "token" in reply
        reply, second = greet(config, content)
        opened.callback(second.close)
        assert reply == {"problem": "node 1 has already joined from 127.0.0.1", "retry": True}
        first.close()
        until(lambda: joins(config, opened), "the second to be accepted")
        until(lambda: not zero.waits, "the node to join")


def test_a_node_that_is_lost_or_ends_is_announced(config: EngineConfig) -> None:
    with node_0(config) as zero, ExitStack() as opened:
        control = join(config, opened)
        until(lambda: not zero.waits, "the node to join")
        assert zero.nodes.host == "127.0.0.1"
        drained: SimpleQueue[None] = SimpleQueue()
        control.send_bytes(b'{"drain": true}')
        zero.nodes.on_drain(lambda: drained.put(None))
        drained.get(timeout=LIMIT_S)
        control.close()
        assert zero.lost.get(timeout=LIMIT_S) == (1, "is gone: its connection ended")


def test_node_0_closes_its_connections_while_a_rank_leaves(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the rank's store is delayed in whatever it closes itself."""
    torch_distributed: Any = dist
    left, closed, main = Event(), Event(), current_thread()

    def close_slowly(connection: Connection) -> None:
        os.close(connection.fileno())
        if current_thread() is not main:
            left.set()
            closed.wait(LIMIT_S)

    with node_0(config) as zero, ExitStack() as opened:
        join(config, opened)
        until(lambda: not zero.waits, "the node to join")
        threads = set(enumerate_threads())
        zero.nodes.rank(1).serve_store(torch_distributed.HashStore())
        (thread,) = set(enumerate_threads()) - threads
        monkeypatch.setattr(Connection, "_close", close_slowly)
        opened.close()
        until(lambda: left.is_set() or not thread.is_alive(), "the store's thread to be done")
        try:
            zero.nodes.close()
        finally:
            closed.set()
            thread.join()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nnodes": 2}, "tensor_parallel_size 1 is not a multiple of nnodes 2"),
        ({"nnodes": 0}, "nnodes must be at least 1, not 0"),
        ({"node_rank": 1}, "node_rank must be 0 to 0, since nnodes is 1, not 1"),
        ({"node_timeout": 0.5}, "node_timeout must be 1 second or more, not 0.5"),
    ],
)
def test_impossible_settings_are_named(
    options: dict[str, Any], words: str, checkpoint: CheckpointMaker
) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_config(checkpoint("llama"), **options)


def test_only_node_0_has_an_engine(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="node_rank 1 has no engine, only ranks"):
        ModelRunner(node(config))


def test_a_port_that_is_taken_is_named(config: EngineConfig) -> None:
    with node_0(config), pytest.raises(ConfigError, match="master_port .* cannot be opened"):
        ModelRunner(config)


def test_ranks_of_other_nodes_use_node_0s_store() -> None:
    torch_distributed: Any = dist
    store = torch_distributed.HashStore()
    ours, theirs = Pipe()
    thread = Thread(target=serve_store, args=(store, ours))
    thread.start()
    with ours, theirs:
        remote = RemoteStore(theirs)
        remote.set("address", b"\x00\xff")
        assert store.get("address") == remote.get("address") == b"\x00\xff"
        store.set("other", "b")
        remote.wait(["address", "other"], timedelta(seconds=LIMIT_S))
        assert remote.add("count", 2) == 2 and store.add("count", 1) == 3
        assert remote.check(["count"]) and not remote.check(["absent"])
        assert remote.delete_key("other") and not store.check(["other"])
        with pytest.raises(RuntimeError):
            remote.wait(["absent"], timedelta(milliseconds=1))
        theirs.close()
        thread.join()


def test_nccl_uses_the_interface_by_which_nodes_meet() -> None:
    assert interface_of("127.0.0.1") == "lo"
