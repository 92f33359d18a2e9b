"""Models and running stacks that the end-to-end tests share.

Stacks are shared by the files of a unit of `headrace_testing.distribution`, and close when the next
test is not of this folder: idle engines and gateways take processor time.

Fixtures import what imports torch: the process that only distributes tests to others loads this
file too.
"""

import fcntl
import json
import socket
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace_testing.distribution import Shared, check_unit
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
SHARED = pytest.StashKey[Shared]()


@pytest.fixture(scope="session", autouse=True)
def sealed_suite(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Seals the data of all tests if HEADRACE_TEST_SEALED=1, and searches Redis for it."""
    yield from sealing(request, tmp_path_factory.getbasetemp())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        shared = item.config.stash.get(SHARED, None)
        stays = nextitem is not None and nextitem.path.parent == item.path.parent
        if shared is not None and not stays:
            shared.close()


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config) -> Iterator[Shared]:
    """Closed here too, for a run that ends early."""
    shared = pytestconfig.stash[SHARED] = Shared()
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def start(request: pytest.FixtureRequest) -> Starter:
    """Starts processes by forking, unless a test must see them start as programs, as with `single`
    and `served`."""
    check_unit(request.path, "forked", "stack")
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


@pytest.fixture(scope="module")
def stack(
    shared: Shared,
    request: pytest.FixtureRequest,
    checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
    start: Starter,
) -> Stack:
    """Two engines and two gateways; the queue has three shards."""
    return shared.get(
        "stack", request.path, lambda: _stack(checkpoint, tmp_path_factory.mktemp("stack"), start)
    )


@contextmanager
def _stack(checkpoint: Path, folder: Path, start: Starter) -> Iterator[Stack]:
    stack = Stack(checkpoint, folder, start=start, queue_shards=3)
    try:
        for _ in range(2):
            stack.add_engine()
            stack.add_gateway()
        stack.await_engines(2)
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def single(
    shared: Shared, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SingleStack:
    """One engine behind one gateway; the model has a long context."""
    return shared.get("single", request.path, lambda: _single(tmp_path_factory))


@contextmanager
def _single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SingleStack]:
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


@pytest.fixture(scope="module")
def served(
    shared: Shared, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> UpProcess:
    """`headrace up` with the demo model, on the README's port if that is free."""
    return shared.get("served", request.path, lambda: _served(tmp_path_factory.mktemp("up")))


@contextmanager
def _served(folder: Path) -> Iterator[UpProcess]:
    with _port_of_the_readme() as port, UpProcess(folder, port=port) as up:
        up.until_served()
        yield up


@pytest.fixture(scope="module")
def paced_up(
    shared: Shared, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> UpProcess:
    """`headrace up` with two engines of small slow steps: a person or a browser can follow a short
    prompt and a short stream. More and faster tokens would only be more work for all processes."""
    return shared.get("paced", request.path, lambda: _paced(tmp_path_factory.mktemp("paced")))


@contextmanager
def _paced(folder: Path) -> Iterator[UpProcess]:
    from headrace_testing import paced

    flags = (
        *("--engines", "2", "--", "--lease", "1", "--beat-interval", "0.25", "--deterministic"),
        *("--max-num-batched-tokens", "32", "--max-num-seqs", "16", "--kv-cache-memory", "96MiB"),
        *paced.flags(milliseconds=40),
    )
    with UpProcess(folder, *flags, env=paced.ENVIRONMENT) as up:
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
