"""The presence of clients alone, with a Redis that is away at times."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.store import StoredRequest
from headrace_gateway.resumable.presence import ClientPresence
from headrace_testing.backends import make_request
from headrace_testing.memory_queue.backend import MemoryBackend
from headrace_testing.memory_queue.store import MemoryRequestStore
from headrace_testing.waiting import eventually
from headrace_testing.wire_messages import STORED

WINDOW_S = 100.0


class ForgetfulStore(MemoryRequestStore):
    """A Redis that knows of no client, and is away for the first `refused` times that it is told of
    one."""

    def __init__(self, refused: int, asked: Callable[[], None] = lambda: None) -> None:
        super().__init__(MemoryBackend())
        self._refused = refused
        self.asked = asyncio.Event()
        self._told = 0
        self._on_asked = asked

    async def set_presence(self, request_id: str, seconds: float) -> None:
        self._told += 1
        if self._told <= self._refused:
            raise BackendUnavailable("redis is away")

    async def presence_left(self, request_id: str) -> float:
        self.asked.set()
        self._on_asked()
        return 0.0

    async def is_told(self, times: int) -> None:
        """Returns once it was told of clients so often."""

        async def told() -> bool:
            return self._told >= times

        await eventually(told)


@pytest.fixture
def stored() -> StoredRequest:
    return replace(STORED, requests=(replace(make_request(), window_ms=int(WINDOW_S * 1000)),))


async def test_a_request_has_its_window_although_redis_missed_its_client(
    stored: StoredRequest,
) -> None:
    store = ForgetfulStore(refused=1)
    presence = ClientPresence(stored, store, clock=lambda: 0.0)
    lost = asyncio.create_task(presence.lost())

    await store.asked.wait()
    assert not lost.done()
    presence.join()

    await store.is_told(2)
    assert not lost.done()
    lost.cancel()


async def test_a_request_is_lost_after_its_window(stored: StoredRequest) -> None:
    times = iter([0.0, WINDOW_S])
    presence = ClientPresence(stored, ForgetfulStore(refused=0), clock=lambda: next(times))

    async with asyncio.timeout(30):
        await presence.lost()


async def test_a_client_may_come_while_redis_is_asked(stored: StoredRequest) -> None:
    times = iter([0.0, WINDOW_S])
    store = ForgetfulStore(refused=0, asked=lambda: presence.join())
    presence = ClientPresence(stored, store, clock=lambda: next(times))
    lost = asyncio.create_task(presence.lost())

    await store.is_told(2)
    assert not lost.done()
    lost.cancel()


async def test_other_gateways_are_told_again_soon_after_redis_was_away(
    stored: StoredRequest,
) -> None:
    store = ForgetfulStore(refused=1)
    presence = ClientPresence(stored, store)
    presence.join()
    lost = asyncio.create_task(presence.lost())

    await store.is_told(2)  # within less than a third of the window

    lost.cancel()
