"""A gateway that was suspended does not take its own silence for the engines'."""

import asyncio
from typing import Any

import pytest

from headrace_common.protocol.base import QueueLimits
from headrace_common.wire.messages import Tokens
from headrace_gateway.queue_client.client import ClientConfig, GenerationClient
from headrace_gateway.queue_client.listening_clock import ListeningClock
from headrace_testing.backends import InMemory, make_request
from headrace_testing.waiting import eventually

CONFIG = ClientConfig(beat_interval=60.0, silence=0.08, recheck=0.08, longest_recheck=0.1)


class ManualClock:
    """A clock that moves only when a test sets it; counts its readings."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now


def test_time_between_two_ticks_counts_up_to_an_interval() -> None:
    clock = ManualClock()
    listening = ListeningClock(2.0, clock)
    begun = listening()

    clock.now += 1.5
    assert listening() - begun == 1.5
    clock.now += 100.0  # no tick has come
    assert listening() - begun == 2.0
    assert listening.tick() == 99.5
    assert listening() - begun == 2.0
    clock.now += 2.0
    assert listening.tick() == 0.0
    assert listening() - begun == 4.0


def test_an_early_tick_loses_nothing() -> None:
    clock = ManualClock()
    listening = ListeningClock(2.0, clock)
    begun = listening()

    clock.now += 1.0
    assert listening.tick() == 0.0
    clock.now += 2.0

    assert listening() - begun == 3.0


@pytest.mark.parametrize("stood_still", [True, False])
async def test_an_engine_keeps_its_request_while_its_gateway_is_paused(
    monkeypatch: pytest.MonkeyPatch, stood_still: bool
) -> None:
    memory, clock = InMemory(), ManualClock()
    queue, released = memory.gateway(), asyncio.Event()

    async def release(*_args: Any) -> None:
        released.set()

    monkeypatch.setattr(queue, "release", release)
    client = GenerationClient(queue, QueueLimits(), config=CONFIG, monotonic=clock)
    await client.start()
    generation = await client.submit(make_request())
    engine = memory.engine()
    (lease,) = await engine.take(1)
    rid = lease.request.request_id
    words = Tokens(request_id=rid, attempt=1, choice=0, index=0, token_ids=(5,))
    await engine.publish({"g": [words]})
    async with asyncio.timeout(30):
        await anext(aiter(generation))

    async def looked_again() -> bool:
        return clock.readings > readings + 100

    if stood_still:
        readings = clock.readings
        clock.now += 1000 * CONFIG.silence
        await eventually(looked_again)
        assert not released.is_set()
    else:
        async with asyncio.timeout(30):
            while not released.is_set():
                clock.now += CONFIG.silence / 8
                await asyncio.sleep(0.002)
    await generation.cancel()
    await client.close()
