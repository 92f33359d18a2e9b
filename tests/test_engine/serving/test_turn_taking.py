"""How engines take turns: one of them is awake, and each leaves the slot only when it sleeps."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.slots import SlotAction, SlotView
from headrace_common.protocol.turns import Demand, Member, Turn, TurnBounds
from headrace_engine.core.config import SleepLevel
from headrace_engine.serving.sharing_config import SharingConfig
from headrace_engine.serving.turn_taking import TurnTaking, load_in_turn
from headrace_testing.waiting import eventually

CONFIG = SharingConfig(level=2, bounds=TurnBounds(5.0, 60.0), timeout=7.0, lease=10.0)
WAITS = Demand(1, 1.0)


@dataclass
class Group:
    """A slot in memory; `now` is its clock."""

    now: float = 1000.0
    turn: Turn = field(default_factory=Turn)
    members: dict[str, Member] = field(default_factory=dict)
    away: bool = False


class FakeSlot:
    def __init__(self, group: Group, engine_id: str) -> None:
        self._group, self.engine_id = group, engine_id
        self.waiting: Demand | None = None

    async def demand(self) -> Demand | None:
        self._check()
        return self.waiting

    async def act(self, action: SlotAction, demand: Demand | None, running: int = 0) -> SlotView:
        self._check()
        group, name = self._group, self.engine_id
        group.members[name] = Member(name, demand, running)
        if action is SlotAction.TAKE and group.turn.holder is None:
            group.turn = replace(group.turn, holder=name, since=group.now)
        if action is SlotAction.LEAVE and group.turn.holder == name:
            group.turn = Turn(None, 0.0, name)
        return SlotView(group.now, group.turn, list(group.members.values()))

    def _check(self) -> None:
        if self._group.away:
            raise BackendUnavailable("away")


class FakeSleeper:
    """Stands in for a Sleeper: the test says when the engine has fallen asleep or woken."""

    def __init__(self) -> None:
        self.wanted: SleepLevel | None = None
        self.level: SleepLevel | None = None
        self.timeout: float | None = None
        self.moving = False

    def ask(self, level: SleepLevel | None, timeout: float | None = None) -> None:
        self.wanted, self.timeout = level, timeout

    def follow(self) -> None:
        self.level = self.wanted


class Engine:
    """An engine of the group, which is awake and has the slot."""

    def __init__(self, group: Group, name: str) -> None:
        self.slot = FakeSlot(group, name)
        self.sleeper = FakeSleeper()
        self.now = 0.0
        self.turns = TurnTaking(self.slot, CONFIG, clock=lambda: self.now)
        group.turn = Turn(name, group.now)

    @property
    def asked(self) -> tuple[SleepLevel | None, float | None]:
        """The level that is wanted, and how long running requests have."""
        return self.sleeper.wanted, self.sleeper.timeout

    async def look(self, *, draining: bool = False, running: int = 0) -> float | None:
        return await self.turns.turn(self.sleeper, draining=draining, running=running)  # type: ignore[arg-type]


async def engines(group: Group) -> tuple[Engine, Engine]:
    """An engine that is awake, and one that has left the slot and sleeps."""
    asleep, awake = Engine(group, "b"), Engine(group, "a")
    asleep.sleeper.wanted = asleep.sleeper.level = CONFIG.level
    await asleep.look()
    return awake, asleep


@pytest.fixture
def group() -> Group:
    return Group()


async def test_a_switch_waits_until_the_holder_sleeps(group: Group) -> None:
    first, second = await engines(group)
    second.slot.waiting = WAITS
    await second.look()
    assert second.sleeper.wanted == 2, "the slot is not free"
    await first.look(running=1)
    assert first.sleeper.wanted is None, "it has work, and its minimum"
    group.now += 5
    await first.look(running=1)
    assert first.asked == (2, 7.0)
    await first.look(running=1)
    await second.look()
    assert group.turn.holder == "a" and second.sleeper.wanted == 2
    first.sleeper.follow()
    await first.look()
    assert group.turn.holder is None
    await second.look()
    assert group.turn.holder == "b" and second.sleeper.wanted is None


async def test_an_engine_that_wakes_slowly_keeps_the_slot(group: Group) -> None:
    first, second = await engines(group)
    second.slot.waiting = WAITS
    group.turn = Turn(None, 0.0, "a")
    await second.look()
    for _ in range(3):
        await second.look()
        assert group.turn.holder == "b", "it has memory already"
    second.sleeper.wanted, second.sleeper.moving = 2, True  # by a request to sleep
    await second.look()
    assert group.turn.holder == "b"
    second.sleeper.moving = False
    await second.look()
    assert group.turn.holder is None


async def test_a_turn_tells_how_long_requests_waited_for_it(group: Group) -> None:
    first, second = await engines(group)
    second.slot.waiting = Demand(1, group.now - 30)
    assert await second.look() is None, "the slot is not free"
    group.turn = Turn(None, 0.0, "a")
    assert await second.look() == 30
    second.sleeper.follow()
    assert await second.look() is None


async def test_an_engine_that_sleeps_says_when_it_will_be_awake(group: Group) -> None:
    first, second = await engines(group)
    assert second.turns.time_to_turn == 0, "nothing waits for it"
    group.members["a"] = Member("a", WAITS, running=1)
    second.slot.waiting = Demand(2, group.now)
    await second.look()
    most, finish = CONFIG.bounds.max_awake, CONFIG.timeout
    assert second.turns.time_to_turn == pytest.approx(most + finish, abs=0.01)
    group.now += 10
    await second.look()
    assert second.turns.time_to_turn == pytest.approx(most + finish - 10, abs=0.01)

    group.turn = Turn(None, 0.0, "a")
    await second.look()
    second.now += 3.0
    second.sleeper.follow()
    await second.look()
    assert second.turns.time_to_turn == 0, "it is awake"
    second.sleeper.wanted = second.sleeper.level = 2
    await second.look()
    group.turn = Turn("a", group.now)
    await second.look()
    assert second.turns.time_to_turn == pytest.approx(most + finish + 3, abs=0.01), "and wakes"


async def test_an_idle_engine_stays_awake_until_another_one_has_work(group: Group) -> None:
    first, second = await engines(group)
    for _ in range(2):
        group.now += 1000
        await second.look()
        await first.look()
        assert first.sleeper.wanted is None
    second.slot.waiting = WAITS
    await second.look()
    await first.look()
    assert first.sleeper.wanted == 2


async def test_a_draining_engine_takes_no_slot_and_leaves_its_own(group: Group) -> None:
    first, second = await engines(group)
    first.slot.waiting = second.slot.waiting = WAITS
    await second.look(draining=True)
    await first.look(draining=True)
    assert first.sleeper.wanted is None
    group.turn = Turn(None, 0.0, "a")
    await second.look(draining=True)
    assert group.turn.holder is None
    group.turn = Turn("a", group.now)
    await second.look()
    await first.look(draining=True)
    assert first.sleeper.wanted == 2


async def test_a_holder_that_cannot_renew_its_lease_sleeps_before_it_ends(group: Group) -> None:
    first, second = await engines(group)
    second.slot.waiting = WAITS
    await first.look()
    group.away = True
    first.now = 4.9
    await first.look(running=1)
    assert first.sleeper.wanted is None
    first.now = 5.1
    await first.look(running=1)
    assert first.asked == (2, 0.0)
    first.sleeper.follow()
    group.away = False
    await first.look()
    assert group.turn.holder is None, "it leaves what it still has"


async def test_a_holder_whose_slot_was_taken_sleeps_at_once(group: Group) -> None:
    first = Engine(group, "a")
    group.turn = Turn("b", group.now)
    await first.look(running=1)
    assert first.asked == (2, 0.0)
    first.slot.waiting = WAITS
    group.turn = Turn(None, 0.0, "b")
    await first.look(running=1)
    assert group.turn.holder is None, "it still falls asleep"
    first.sleeper.follow()
    await first.look()
    assert group.turn.holder == "a" and first.sleeper.wanted is None


async def test_a_slot_that_redis_has_lost_is_taken_again(group: Group) -> None:
    first = Engine(group, "a")
    group.turn = Turn()
    await first.look(running=1)
    assert group.turn.holder == "a" and first.sleeper.wanted is None


async def test_a_model_is_loaded_when_the_slot_is_free(group: Group) -> None:
    holder = Engine(group, "a")
    loaded = asyncio.Event()
    event_loop = asyncio.get_running_loop()

    def load() -> str:
        event_loop.call_soon_threadsafe(loaded.set)
        return "model"

    slot = FakeSlot(group, "b")
    loading = asyncio.create_task(
        load_in_turn(slot, CONFIG, load, sleep=lambda _: asyncio.sleep(0))
    )

    async def known() -> bool:
        return group.members.get("b", Member("b")).demand is not None

    await eventually(known)
    assert not loaded.is_set() and group.turn.holder == "a"
    await holder.look()
    assert holder.sleeper.wanted == 2, "a model that is to be loaded is work"
    holder.sleeper.follow()
    await holder.look()
    assert await loading == "model"
    assert group.turn.holder == "b"
