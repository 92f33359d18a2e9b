"""The gateway's client with fake engines over a real Valkey, while engines and servers fail.

Faults depend on a seed; times are short so that leases expire within the test. test_chaos tests
real processes under the same faults.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_testing.backends import make_request
from headrace_testing.fake_engine import POISON_TOKEN, EngineDied
from headrace_testing.histories import ChaosSystem, History
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import eventually


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[ChaosSystem]:
    server = ValkeyServer(tmp_path / "data")
    server.start()
    system = ChaosSystem(server, seed=5)
    system.slots = 3  # so that most requests wait in the lists of their tenants
    await system.start(engines=3)
    yield system
    await system.close()
    server.stop()


@pytest.mark.parametrize(
    "faults",
    [
        ("kill", "kill"),
        ("freeze", "kill"),
        ("drain", "freeze"),
        ("restart", "kill"),
        ("wipe", "kill"),
        ("rollback", "kill"),
        ("kill", "stray"),
        ("wipe", "stray"),
    ],
    ids="-".join,
)
async def test_every_stream_is_complete(
    system: ChaosSystem, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    requests = [
        replace(
            make_request(n=1 + number % 2, max_tokens=20 + 4 * number, priority=number % 3 - 1),
            tenant=f"tenant-{number % 4}",
        )
        for number in range(16)
    ]
    answers = [asyncio.create_task(system.answer(request)) for request in requests]
    for kind in faults:
        await asyncio.sleep(0.25)
        await system.fault(kind, tmp_path)
    async with asyncio.timeout(60):
        await asyncio.gather(*answers)
    for engine in system.engines:
        engine.thaw()
    await eventually(system.is_empty)
    await eventually(system.ledger_is_right)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_the_ledger_has_what_clients_were_given(tmp_path: Path, seed: int) -> None:
    history = History(seed)
    assert await history.run(tmp_path) == []
    assert history.checked == 16


async def test_a_poison_request_does_not_fail_other_requests(system: ChaosSystem) -> None:
    async def replace_dead_engines() -> None:
        while True:
            done, _ = await asyncio.wait(
                system.engines.values(), return_when=asyncio.FIRST_COMPLETED
            )
            for engine in [e for e, task in system.engines.items() if task in done]:
                assert isinstance(system.engines.pop(engine).exception(), EngineDied)
                system.spawn()

    replacing = asyncio.create_task(replace_dead_engines())
    poison = asyncio.create_task(system.answer(make_request(prompt=(1, POISON_TOKEN))))
    others = [asyncio.create_task(system.answer(make_request(max_tokens=30))) for _ in range(10)]
    async with asyncio.timeout(60):
        await asyncio.gather(*others)
        with pytest.raises(Exception, match="failed on several engines"):
            await poison
    replacing.cancel()
    assert [why for _, why in await system.backend.dead_letters()] == ["poisoned"]
    await eventually(system.is_empty)
