"""Real processes break while 64 clients stream: no token is lost, repeated or changed.

Covers engines (killed, frozen, drained) and Valkey (killed and restarted with its append-only
file). Gateways that die are the clients' matter here: they reconnect.
"""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until
from headrace_testing.stack import EngineProcess, Stack
from headrace_testing.streams import Crowd

# Every stream has begun, none is near its end.
EARLY = 64 * 40


@pytest.fixture
def crowd(stack: Stack, cases: list[GreedyCase]) -> Iterator[Crowd]:
    """Clients on two working engines; afterwards nothing may be left of them."""
    for _ in range(2 - len(stack.engines)):
        stack.add_engine()
    stack.await_engines(2)
    crowd = Crowd([gateway.url for gateway in stack.gateways], cases)
    yield crowd
    assert crowd.mistakes() == []
    until(stack.queue_is_empty, "the queue to be empty")
    for engine in stack.engines:
        until(lambda e=engine: e.idle, f"{engine.name} to hold no sequence and no block")  # type: ignore[misc]


def busy_engine(stack: Stack) -> EngineProcess:
    """The engine that runs most sequences."""
    return max(stack.engines, key=lambda e: e.metric("headrace_engine_requests", 'state="running"'))


def test_undisturbed_streams_get_the_greedy_tokens(crowd: Crowd) -> None:
    asyncio.run(crowd.run())


def test_engine_killed(crowd: Crowd, stack: Stack) -> None:
    asyncio.run(crowd.run_while(lambda: stack.retire(busy_engine(stack)), EARLY))


def test_engine_frozen_beyond_its_lease_and_woken(crowd: Crowd, stack: Stack) -> None:
    frozen = busy_engine(stack)
    asyncio.run(crowd.run_while(lambda: frozen.signal(signal.SIGSTOP), EARLY))
    frozen.signal(signal.SIGCONT)
    until(lambda: frozen.idle, "the woken engine to drop what others have finished")
    assert frozen.alive


def test_engine_drained_gives_back_what_it_cannot_finish(crowd: Crowd, stack: Stack) -> None:
    drained = stack.add_engine("--drain-timeout", "0")
    stack.await_engines(3)

    def drain() -> None:
        drained.signal(signal.SIGTERM)
        assert drained.wait() == 0

    asyncio.run(crowd.run_while(drain, EARLY))
    stack.retire(drained)


def test_valkey_killed_and_restarted(crowd: Crowd, stack: Stack) -> None:
    asyncio.run(crowd.run_while(stack.valkey.restart, EARLY))
