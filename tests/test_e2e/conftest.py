"""Models and running stacks that the end-to-end tests share.

Fixtures import what imports torch: the process that only distributes tests to others loads this
file too.
"""

import fcntl
import json
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace_testing.forked import Forge
from headrace_testing.headrace_up import UpProcess
from headrace_testing.processes import Starter
from headrace_testing.sealed_suite import suite as sealing
from headrace_testing.single import CONTEXT, SingleStack
from headrace_testing.stack import Stack
from headrace_testing.telemetry import otlp_collector

if TYPE_CHECKING:
    from headrace_testing.greedy import GreedyCase

STREAMS = 64
OUTPUT_TOKENS = 320


@pytest.fixture(scope="session", autouse=True)
def sealed_suite(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Seals the data of all tests if HEADRACE_TEST_SEALED=1, and searches Redis for it."""
    yield from sealing(request, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def start() -> Starter:
    """Starts processes by forking, unless a test must see them start as programs, as with `single`
    and `served`."""
    return Forge().start


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from headrace_testing.checkpoints import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=1024)


@pytest.fixture(scope="session")
def cases(checkpoint: Path) -> "list[GreedyCase]":
    """Prompts with their undisturbed greedy outputs."""
    from headrace_testing.greedy import clear_cases

    return clear_cases(checkpoint, STREAMS, OUTPUT_TOKENS)


@pytest.fixture(scope="session")
def stack(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, start: Starter
) -> Iterator[Stack]:
    """Two engines and two gateways; the queue has three shards."""
    folder = tmp_path_factory.mktemp("stack")
    stack = Stack(checkpoint, folder, start=start, queue_shards=3)
    try:
        for _ in range(2):
            stack.add_engine()
            stack.add_gateway()
        stack.await_engines(2)
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SingleStack]:
    """One engine behind one gateway; the model has a long context."""
    from headrace_testing.checkpoints import save_checkpoint

    checkpoint = save_checkpoint(
        tmp_path_factory.mktemp("long"), "llama", max_position_embeddings=CONTEXT
    )
    settings = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    with otlp_collector() as collector:
        single = SingleStack(checkpoint, tmp_path_factory.mktemp("single"), collector)
        try:
            single.until_ready()
            yield single
        finally:
            single.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """`headrace up` with the demo model, on the README's port if that is free."""
    with (
        _port_of_the_readme() as port,
        UpProcess(tmp_path_factory.mktemp("up"), port=port) as up,
    ):
        up.until_served()
        yield up


@contextmanager
def _port_of_the_readme() -> Iterator[int | None]:
    """Reserves the port: other workers would look for it before the first one listens."""
    with (Path(tempfile.gettempdir()) / "headrace-port-8000.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", 8000))
            port = 8000
        except OSError:
            port = None
        yield port
