"""Slots that tenants share: no tenant gets all of them, waiting tenants take turns, and waits are
bounded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from headrace_common.pools.fair_slots import FairSlots, SlotsFull


class Work:
    """Tasks that hold a slot until they are told to leave it; `order` lists who got one."""

    def __init__(self, slots: FairSlots) -> None:
        self._slots = slots
        self.order: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str) -> None:
        """Starts a task; `name` begins with its tenant's letter."""
        self._leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name))
        await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def _run(self, name: str) -> None:
        async with self._slots.hold(name[0]):
            self.order.append(name)
            await self._leave[name].wait()


@asynccontextmanager
async def work(slots: FairSlots) -> AsyncIterator[Work]:
    made = Work(slots)
    yield made
    for task in made.tasks.values():
        task.cancel()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)


async def test_a_tenant_has_all_but_one_slot() -> None:
    async with work(FairSlots(3, most=9, most_of_tenant=9)) as made:
        for name in ("a1", "a2", "a3", "b1"):
            await made.start(name)
        assert made.order == ["a1", "a2", "b1"]

        await made.leave("b1")
        assert made.order == ["a1", "a2", "b1"]
        await made.leave("a1")
        assert made.order == ["a1", "a2", "b1", "a3"]


async def test_tenants_that_wait_take_turns() -> None:
    async with work(FairSlots(2, most=9, most_of_tenant=9)) as made:
        for name in ("a1", "b1", "a2", "a3", "b2", "c1"):
            await made.start(name)
        for name in ("a1", "b1", "a2", "b2", "c1"):
            await made.leave(name)

    assert made.order == ["a1", "b1", "a2", "b2", "c1", "a3"]


async def test_one_slot_serves_all() -> None:
    async with work(FairSlots(1, most=9, most_of_tenant=9)) as made:
        await made.start("a1")
        await made.start("a2")
        await made.leave("a1")

    assert made.order == ["a1", "a2"]


async def test_the_number_of_waiting_tasks_is_limited() -> None:
    slots = FairSlots(2, most=3, most_of_tenant=2)
    async with work(slots) as made:
        for name in ("a1", "b1", "a2", "a3"):
            await made.start(name)
        with pytest.raises(SlotsFull) as own:
            async with slots.hold("a"):
                pass
        await made.start("c1")
        with pytest.raises(SlotsFull) as all_:
            async with slots.hold("d"):
                pass

    assert (own.value.tenant, all_.value.tenant) == (True, False)


async def test_a_wait_ends_in_time() -> None:
    slots = FairSlots(2, most=9, most_of_tenant=9)
    async with AsyncExitStack() as held:
        await held.enter_async_context(slots.hold("a"))
        with pytest.raises(SlotsFull) as own:
            async with slots.hold("a", 0.01):
                pass
        await held.enter_async_context(slots.hold("b"))
        with pytest.raises(SlotsFull) as others:
            async with slots.hold("c", 0.01):
                pass

    assert (own.value.tenant, others.value.tenant) == (True, False)
    async with slots.hold("c", 0.01):
        pass


async def test_a_cancelled_wait_takes_no_slot() -> None:
    async with work(FairSlots(1, most=9, most_of_tenant=9)) as made:
        for name in ("a1", "a2", "a3"):
            await made.start(name)
        made.tasks["a2"].cancel()  # in the same turn of the loop in which a slot becomes free
        await made.leave("a1")
        assert made.order == ["a1", "a3"]

        await made.start("a4")
        made._leave["a3"].set()
        await made.tasks["a3"]
        made.tasks["a4"].cancel()  # in the same turn of the loop in which it got the slot
        await asyncio.gather(made.tasks["a4"], return_exceptions=True)
        await made.start("a5")
        assert made.order[-1] == "a5"
