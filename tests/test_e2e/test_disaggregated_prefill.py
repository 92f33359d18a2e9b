"""A producer computes prompts and hands them over to a consumer; engines die, files are damaged.

Each client gets exactly the model's greedy tokens. All processes and files are real.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from headrace_common.protocol.ledger import UsageEntry
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.ledger import LedgerReader
from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import Starter, until
from headrace_testing.stack import MODEL, EngineProcess, Stack
from headrace_testing.streams import Crowd

LOCAL = 24  # the longest prompt that the consumer computes itself
ROUND = 12  # requests


class Apart:
    """A producer, a consumer and a gateway, with a folder for KV."""

    def __init__(self, checkpoint: Path, folder: Path, start: Starter) -> None:
        self.kv = folder / "kv"
        self.stack = Stack(checkpoint, folder, start=start)
        self.gateway = self.stack.add_gateway()
        self.producer = self.add("kv_producer")
        self.consumer = self.add("kv_consumer")
        self.await_roles()

    def await_roles(self) -> None:
        """Waits until the engines have seen each other."""
        self.stack.await_engines(2)
        for engine in self.stack.engines:
            engine.await_log("requests to take have changed")

    def add(self, role: str, *flags: str) -> EngineProcess:
        return self.stack.add_engine(
            *("--kv-role", role, "--max-local-prefill-length", str(LOCAL)),
            *("--kv-offloading-folder", str(self.kv), "--swap-space", "0.05"),
            *("--block-size", "4", "--display-name", role, "--max-num-seqs", "16"),
            *("--remote-prefill-timeout", "60", *flags),
        )

    @contextmanager
    def streaming(self, cases: list[GreedyCase]) -> Iterator[Crowd]:
        """Streams meanwhile; each must be right in the end."""
        crowd = Crowd([self.gateway.url], cases)
        thread = Thread(target=lambda: asyncio.run(crowd.run()))
        thread.start()
        try:
            yield crowd
        finally:
            thread.join()
        assert crowd.mistakes() == []

    def handed_over(self) -> float:
        return handovers(self.producer)


def handovers(engine: EngineProcess) -> float:
    try:
        return engine.metric("headrace_engine_handover_duration_seconds_count")
    except AssertionError:  # none yet
        return 0.0


async def usage_entries(url: str) -> list[UsageEntry]:
    connection = Connection(ConnectionConfig(url=url))
    try:
        return [entry async for entry in LedgerReader(connection, {MODEL: 1}).entries()]
    finally:
        await connection.close()


@pytest.fixture
def apart(checkpoint: Path, tmp_path: Path, start: Starter) -> Iterator[Apart]:
    apart = Apart(checkpoint, tmp_path, start)
    try:
        yield apart
    finally:
        apart.stack.close()


@pytest.fixture(scope="module")
def long_cases(cases: list[GreedyCase]) -> list[GreedyCase]:
    return [case for case in cases if len(case.prompt) > LOCAL][:ROUND]


@pytest.fixture(scope="module")
def short_cases(cases: list[GreedyCase]) -> list[GreedyCase]:
    return [case for case in cases if len(case.prompt) <= LOCAL][:4]


def test_long_prompts_are_handed_over_with_their_kv(
    apart: Apart, long_cases: list[GreedyCase], short_cases: list[GreedyCase]
) -> None:
    with apart.streaming([*long_cases, *short_cases]):
        pass

    assert apart.handed_over() >= len(long_cases)
    tokens = apart.producer.metric("headrace_engine_handover_tokens_total")
    assert tokens >= sum((len(case.prompt) - 1) // 4 * 4 for case in long_cases)
    assert apart.producer.metric("headrace_engine_handover_kv_bytes_total") > tokens
    shared = apart.consumer.metric("headrace_engine_prefix_cache_hits_total", 'place="shared"')
    assert shared > 0, "the consumer reads what the producer wrote"
    until(apart.stack.queue_is_empty, "the queue to be empty")
    entries = asyncio.run(usage_entries(apart.stack.redis_url))
    assert sorted(entry.output_tokens for entry in entries) == sorted(
        len(case.output) for case in [*long_cases, *short_cases]
    ), "each request is entered once"


def test_a_producer_that_is_killed_loses_nothing(
    apart: Apart, long_cases: list[GreedyCase]
) -> None:
    """Some requests are handed over, some are on their way, and some have not begun."""
    with apart.streaming(long_cases):
        until(lambda: apart.handed_over() >= 2, "requests to be handed over")
        apart.producer.kill()

    with apart.streaming(long_cases):  # without a producer the consumer does everything
        pass


def test_a_consumer_that_is_killed_loses_nothing(
    apart: Apart, long_cases: list[GreedyCase], short_cases: list[GreedyCase]
) -> None:
    with apart.streaming(long_cases):
        until(lambda: apart.handed_over() >= 2, "requests to be handed over")
        apart.consumer.kill()

    with apart.streaming(short_cases):  # without a consumer the producer does everything
        pass


def test_kv_that_is_lost_or_damaged_is_computed_again(
    apart: Apart, long_cases: list[GreedyCase]
) -> None:
    """Files are cut, changed or deleted as soon as they are written."""
    going_on, damaged = True, set[Path]()

    def damage() -> None:
        while going_on:
            for path in apart.kv.rglob("*"):
                if path.is_file() and path.suffix != ".tmp" and path not in damaged:
                    spoil(path, len(damaged))
                    damaged.add(path)

    thread = Thread(target=damage)
    thread.start()
    try:
        with apart.streaming(long_cases):
            pass
    finally:
        going_on = False
        thread.join()
    assert len(damaged) > len(long_cases)
    assert apart.handed_over() >= len(long_cases)


def spoil(path: Path, number: int) -> None:
    try:
        content = path.read_bytes()
        if number % 3 == 0:
            path.unlink()
        elif number % 3 == 1:
            path.write_bytes(content[: len(content) // 2])
        else:
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    except FileNotFoundError:  # its engine has found the damage
        pass


def test_engines_of_another_fingerprint_compute_again(
    apart: Apart, long_cases: list[GreedyCase]
) -> None:
    """The consumer has another block size than the producer, so their KV differs."""
    apart.stack.retire(apart.consumer)
    until(lambda: len(apart.stack.engine_status()) == 1, "the consumer to be forgotten")
    other = apart.add("kv_consumer", "--block-size", "8")
    apart.await_roles()

    with apart.streaming(long_cases):
        pass

    assert apart.handed_over() >= len(long_cases)
    hits = other.metric("headrace_engine_prefix_cache_hits_total", 'place="shared"')
    assert hits == 0
