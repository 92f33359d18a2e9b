"""SIGTERM to real processes in any phase of their life, and engines that are told to drain."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace_common.protocol.base import EngineStatus
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.wire.messages import Control, Drain, Recall
from headrace_testing.greedy import clear_cases
from headrace_testing.needs import missing
from headrace_testing.processes import HeadraceProcess, Starter, frozen, until
from headrace_testing.stack import MODEL, Stack
from headrace_testing.streams import Crowd
from headrace_testing.valkey import free_port

MODULES = ["headrace_engine", "headrace_gateway", "headrace_operator"]


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & 1 << (number - 1))
    return False


def maps(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("module", MODULES)
def test_a_process_ends_at_sigterm_before_it_has_imported_anything(
    module: str, tmp_path: Path
) -> None:
    reached = tmp_path / "reached"
    endless = f"import pathlib, time\npathlib.Path({str(reached)!r}).touch()\ntime.sleep(3600)\n"
    (tmp_path / "pydantic.py").write_text(endless)
    with HeadraceProcess(module, (), tmp_path / "log", {"PYTHONPATH": str(tmp_path)}) as process:
        until(reached.exists, "the first large import to begin")
        assert catches(process.pid, signal.SIGTERM)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("module", "library"), [*((module, "pydantic_core") for module in MODULES),
                            ("headrace_engine", "libtorch_cpu")]
)  # fmt: skip
def test_a_process_ends_at_a_signal_while_it_imports(
    module: str, library: str, number: int, tmp_path: Path
) -> None:
    with HeadraceProcess(module, (), tmp_path / "log") as process:
        until(lambda: maps(process.pid, library), f"{library} to be loaded")
        process.signal(number)
        assert process.wait() == 0
        assert "Traceback" not in process.log.read_text()


@pytest.mark.parametrize("module", MODULES)
def test_the_first_process_of_a_container_ends_at_sigterm(module: str, tmp_path: Path) -> None:
    """The kernel drops signals to it for which it has no handler."""
    with first_process(module, tmp_path / "log") as (container, pid):
        until(lambda: catches(pid, signal.SIGTERM), "SIGTERM to be caught")
        os.kill(pid, signal.SIGTERM)
        assert container.wait(120) == 0


@contextmanager
def first_process(module: str, log: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Starts the process as number 1 of a pid namespace.

    Returns unshare, which ends when it does, and its pid.
    """
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        missing("unshare as root")
    command = [unshare, "--pid", "--fork", "--kill-child", sys.executable, "-m", module]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as container:
        children = Path(f"/proc/{container.pid}/task/{container.pid}/children")
        try:
            until(lambda: bool(children.read_text()), "the process to be started")
            yield container, int(children.read_text().split()[0])
        finally:
            container.kill()


def test_an_engine_ends_at_sigterm_while_it_reads_its_model(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The model is a file without an end, as on a volume that hangs."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    arguments = ("--model", str(folder), *no_redis())
    with HeadraceProcess("headrace_engine", arguments, tmp_path / "log") as process:
        with (folder / "config.json").open("wb"):  # opens when the engine reads it
            process.signal(signal.SIGTERM)
            assert process.wait() == 0


@pytest.mark.parametrize(
    ("module", "waits"),
    [
        ("headrace_engine", "redis unavailable, will retry"),
        ("headrace_gateway", "waiting for redis"),
    ],
)
def test_a_process_without_redis_ends_at_sigterm(
    module: str, waits: str, checkpoint: Path, tmp_path: Path
) -> None:
    arguments = ["--model", str(checkpoint), *no_redis()]
    if module == "headrace_gateway":
        arguments += ["--port", "0"]
    with HeadraceProcess(module, arguments, tmp_path / "log") as process:
        process.await_log(waits)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert "Traceback" not in process.log.read_text()


def no_redis() -> list[str]:
    return ["--redis-url", f"redis://127.0.0.1:{free_port()}/0", "--log-format", "json"]


@pytest.fixture
def engine_stack(checkpoint: Path, tmp_path: Path, start: Starter) -> Iterator[Stack]:
    """A stack without processes."""
    stack = Stack(checkpoint, tmp_path, start=start)
    try:
        yield stack
    finally:
        stack.close()


def test_a_drained_engine_set_to_wait_runs_until_sigterm(engine_stack: Stack) -> None:
    engine = engine_stack.add_engine("--after-drain", "wait")
    engine_stack.await_engines(1)

    tell(engine_stack, Drain())
    until(lambda: status(engine_stack).draining, "the engine to drain")
    engine.await_log("drained")
    assert engine.alive
    assert not status(engine_stack).running

    engine.signal(signal.SIGTERM)
    assert engine.wait() == 0


def test_an_engine_that_is_recalled_serves_again(engine_stack: Stack) -> None:
    engine = engine_stack.add_engine("--after-drain", "wait")
    engine_stack.await_engines(1)

    tell(engine_stack, Drain())
    engine.await_log("drained")
    tell(engine_stack, Recall())
    until(lambda: not status(engine_stack).draining, "the engine to take work again")
    tell(engine_stack, Drain())
    until(lambda: status(engine_stack).draining, "the engine to drain again")

    engine.signal(signal.SIGTERM)
    assert engine.wait() == 0


def test_a_drained_engine_exits_by_default(engine_stack: Stack) -> None:
    engine = engine_stack.add_engine()
    engine_stack.await_engines(1)
    tell(engine_stack, Drain())
    assert engine.wait() == 0


def test_an_engine_whose_node_ends_soon_hands_over_all_answers(
    engine_stack: Stack, checkpoint: Path, tmp_path: Path
) -> None:
    """It is told 5 s before it is killed, although its drain could take ten minutes."""
    tier = ("--swap-space", "0.25", "--kv-offloading-folder", str(tmp_path / "kv"))
    flags = ("--after-drain", "wait", "--drain-timeout", "600", "--lease", "60", *tier)
    first = engine_stack.add_engine(*flags)
    url = engine_stack.add_gateway().url
    engine_stack.await_engines(1)
    crowd = Crowd([url], clear_cases(checkpoint, 8, 160))

    engine_id = status(engine_stack).engine_id
    with ThreadPoolExecutor(1) as clients:
        answers = clients.submit(lambda: asyncio.run(crowd.run()))
        until(lambda: all(each.token_ids for each in crowd.received), "all streams to begin")
        with frozen([first]):  # so that no answer ends before the message comes
            control = Drain(within_ms=5000)
            on_queue(engine_stack, lambda queue: queue.send(engine_id, MODEL, control))
            told = time.monotonic()
        first.await_log("requests are handed over: the engine's node ends")
        first.await_log("drained")
        assert not answers.done()
        second = engine_stack.add_engine(*flags)
        time.sleep(max(0.0, told + 5 - time.monotonic()))
        engine_stack.retire(first)
        answers.result()

    assert crowd.mistakes() == []
    until(engine_stack.queue_is_empty, "the queue to be empty")
    assert second.metric("headrace_engine_kv_shared_blocks_total", 'result="hit"') > 0


def status(stack: Stack) -> EngineStatus:
    (found,) = stack.engine_status()
    return found


def tell(stack: Stack, control: Control) -> None:
    """Sends a control message to the only engine."""
    engine_id = status(stack).engine_id
    on_queue(stack, lambda queue: queue.send(engine_id, MODEL, control))


def on_queue(stack: Stack, action: Callable[[RedisGatewayQueue], Awaitable[None]]) -> None:
    async def act() -> None:
        connection = Connection(ConnectionConfig(url=stack.redis_url))
        try:
            await action(RedisGatewayQueue(connection, "test"))
        finally:
            await connection.close()

    asyncio.run(act())
