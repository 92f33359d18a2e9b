"""The rule of turns on a shared accelerator, and its bounds under any load."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.protocol.turns import (
    Demand,
    Member,
    SwitchTimes,
    Turn,
    TurnBounds,
    next_holder,
    time_to_turn,
)

Request = tuple[float, int, float]
_REQUEST = st.tuples(st.floats(0, 300), st.integers(0, 2), st.floats(0.1, 40))
# Seconds of virtual time: a switch, and between two decisions.
SWITCH, TICK = 2.0, 1.0
BOUNDS = TurnBounds(min_awake=5.0, max_awake=60.0)
NOW = 1000.0
NORMAL = Demand(1, NOW - 1)
IDLE = Member("a")
WAITS = Member("b", NORMAL)


def holder_of(*members: Member, awake: float = 30.0, **turn: str | None) -> str | None:
    """The next holder if `a` has been awake for some seconds, or with the slot as `turn` says."""
    now = Turn(**{"holder": "a", "since": NOW - awake, **turn})  # type: ignore[arg-type]
    return next_holder(members, now, BOUNDS, NOW)


def test_an_engine_stays_awake_while_nothing_waits_for_others() -> None:
    assert holder_of(IDLE, Member("b"), awake=1e6) == "a"
    assert holder_of(Member("a", NORMAL), Member("b"), awake=1e6) == "a"


def test_an_engine_without_work_yields_at_once() -> None:
    assert holder_of(IDLE, WAITS, awake=0.0) == "b"
    assert holder_of(replace(IDLE, running=1), WAITS, awake=0.0) == "a"


def test_an_engine_with_work_has_its_minimum_and_its_maximum() -> None:
    busy, urgent = Member("a", NORMAL), Member("b", Demand(0, NOW - 10, NOW + 1))
    late = Member("b", Demand(2, NOW - 0.5))
    assert holder_of(busy, urgent, awake=4.9) == "a"
    assert holder_of(busy, urgent, awake=5.0) == "b"
    assert holder_of(busy, late, awake=59.9) == "a"
    assert holder_of(busy, late, awake=60.0) == "b"


@pytest.mark.parametrize(
    "more_urgent",
    [Demand(0, NOW), Demand(1, NOW, NOW + 20), Demand(1, NOW - 2), Demand(2, NOW - 61)],
    ids=["priority", "deadline", "age", "passed over"],
)
def test_what_is_more_urgent_goes_first(more_urgent: Demand) -> None:
    own = Member("a", Demand(1, NOW - 1))
    assert holder_of(own, Member("b", more_urgent)) == "b"
    assert holder_of(Member("a", more_urgent), Member("b", Demand(1, NOW - 1))) == "a"


def test_a_deadline_that_another_turn_would_not_miss_changes_nothing() -> None:
    assert holder_of(Member("a", NORMAL), Member("b", Demand(1, NOW, NOW + 61))) == "a"


def test_a_free_slot_goes_to_another_engine_than_before() -> None:
    oldest = Member("a", Demand(0, 0.0))
    assert holder_of(oldest, WAITS, holder=None, last="a") == "b"
    assert holder_of(oldest, Member("b"), holder=None, last="a") == "a"
    assert holder_of(IDLE, Member("b"), holder=None, last="a") is None


@dataclass
class Model:
    """A simulated model: requests (since when, priority, seconds left) run one by one."""

    arrivals: list[Request]
    waiting: list[Request] = field(default_factory=list)
    passed_over_since: float | None = None
    ended: float = 0.0

    def member(self, name: str) -> Member:
        if not self.waiting:
            return Member(name, ended=self.ended)
        since, priority = min(w[0] for w in self.waiting), min(w[1] for w in self.waiting)
        return Member(name, Demand(priority, since), ended=self.ended)

    def pass_time(self, now: float, *, awake: bool) -> None:
        if awake and self.waiting:
            since, priority, left = self.waiting[0]
            self.waiting[0] = since, priority, left - TICK
            self.waiting = [one for one in self.waiting if one[2] > 0]
        while self.arrivals and self.arrivals[0][0] <= now:
            self.waiting.append(self.arrivals.pop(0))
        if awake or not self.waiting:
            self.passed_over_since = None
        elif self.passed_over_since is None:
            self.passed_over_since = now


@given(st.lists(st.lists(_REQUEST, max_size=25), min_size=2, max_size=4))
def test_every_engine_with_work_gets_its_turn(loads: list[list[Request]]) -> None:
    """In virtual time, with a switch of two seconds; a request that runs is interrupted at the end
    of a turn and goes on in the next one."""
    bounds = TurnBounds(2.0, 20.0)
    models = {str(number): Model(sorted(load)) for number, load in enumerate(loads)}
    turn, now, free_at = Turn(), 1.0, 0.0
    longest = (2 * len(models)) * (bounds.max_awake + SWITCH + 2 * TICK)
    while any(model.arrivals or model.waiting for model in models.values()):
        members = [model.member(name) for name, model in models.items()]
        chosen = next_holder(members, turn, bounds, now)
        if turn.holder is not None and chosen != turn.holder:
            models[turn.holder].ended, free_at = now, now + SWITCH
            turn = Turn(None, 0.0, turn.holder)
        elif turn.holder is None and chosen is not None and now >= free_at:
            turn = Turn(chosen, now, turn.last)
        for name, model in models.items():
            model.pass_time(now, awake=name == turn.holder)
            waits_since = model.passed_over_since
            assert waits_since is None or now - waits_since <= longest, f"{name} starves"
        now += TICK


# Whole seconds, so that a step of virtual time misses nothing.
_PAST, _LATER = st.integers(-300, 0), st.integers(0, 300)
_DEMAND = st.builds(
    lambda priority, since, left: Demand(priority, NOW + since, NOW + left),
    st.integers(0, 2),
    _PAST,
    st.one_of(st.just(float("inf")), _LATER),
)
TIMES = SwitchTimes(finish=3.0, wake=2.0)


@given(
    st.lists(st.tuples(st.one_of(st.none(), _DEMAND), _PAST), max_size=2),
    _DEMAND,
    st.integers(-1, 1),
    st.integers(0, 100),
)
def test_the_time_to_a_turn_is_that_of_virtual_time(
    others: list[tuple[Demand | None, int]], demand: Demand, holder: int, awake: int
) -> None:
    members = {
        str(number): Member(str(number), each, ended=NOW + ended)
        for number, (each, ended) in enumerate(others)
    }
    members["own"] = Member("own", demand)
    begun = Turn(str(holder), NOW - awake) if str(holder) in members else Turn()
    expected = time_to_turn("own", list(members.values()), begun, BOUNDS, NOW, TIMES)

    tick, turn, now, busy_until = 0.125, begun, NOW, NOW
    while turn.holder != "own" or now < busy_until:
        chosen = next_holder(list(members.values()), turn, BOUNDS, now)
        if now < busy_until:
            pass
        elif turn.holder is None:
            turn, busy_until = Turn(chosen, now, turn.last), now + TIMES.wake
        elif chosen != turn.holder:
            leaver = members[turn.holder]
            busy_until = now + (TIMES.finish if leaver.demand is not None else 0.0)
            members[turn.holder] = replace(leaver, ended=busy_until)
            turn = Turn(None, 0.0, turn.holder)
        now += tick

    assert expected == pytest.approx(now - NOW, abs=2 * tick * (1 + 8 * len(members)))


def test_an_engine_without_work_has_no_turn_to_wait_for() -> None:
    members = [Member("a", running=1), Member("own")]
    assert time_to_turn("own", members, Turn("a", NOW), BOUNDS, NOW, TIMES) == 0
