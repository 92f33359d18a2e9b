"""The proxy of the faults leaves no connection to the garbage collector, whenever it is cut."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from headrace_testing.chaos.proxy import FaultProxy
from headrace_testing.forwarding import Forwarder, Passing
from headrace_testing.waiting import eventually


@pytest.fixture
def target() -> Iterator[int]:
    """The port of a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


class Ways:
    """Replaces both directions: one ends at once, the other one only when it is told a second
    time."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.leaving = asyncio.Event()

    async def copy(
        self, _: asyncio.StreamReader, writer: asyncio.StreamWriter, __: Passing
    ) -> None:
        self.writers.append(writer)
        if len(self.writers) < 2:
            return
        try:
            await asyncio.Event().wait()
        finally:
            self.leaving.set()
            await asyncio.Event().wait()


@pytest.fixture
async def client(target: int) -> AsyncIterator[tuple[Forwarder, Ways]]:
    ways = Ways()
    forwarder = Forwarder(target, ways.copy)
    with socket.create_connection(("127.0.0.1", await forwarder.listen())):
        yield forwarder, ways
    forwarder.refuse()


async def test_a_connection_that_is_cut_while_it_ends_is_closed_on_both_sides(
    client: tuple[Forwarder, Ways],
) -> None:
    forwarder, ways = client
    await asyncio.wait_for(ways.leaving.wait(), 60)
    await forwarder.cut()
    assert [writer.is_closing() for writer in ways.writers] == [True, True]
    assert not forwarder.passing


async def test_a_connection_that_is_cut_before_it_is_passed_on_is_closed(target: int) -> None:
    forwarder = Forwarder(target, Ways().copy)
    port = await forwarder.listen()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def taken() -> bool:
        return bool(forwarder.passing)

    try:
        await eventually(taken)
        await forwarder.cut()
        assert await asyncio.wait_for(reader.read(), 60) == b""
    finally:
        writer.close()
        forwarder.refuse()


def test_connections_made_while_the_proxy_stops_are_closed(target: int) -> None:
    """A connection that stays open fails this test."""
    for _ in range(20):
        proxy = FaultProxy(target).start()
        with ExitStack() as clients:
            for _ in range(4):
                clients.enter_context(socket.create_connection(("127.0.0.1", proxy.port)))
            proxy.stop()
    gc.collect()
