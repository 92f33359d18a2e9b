"""The rule of turns on an accelerator that several engines share, by what waits for each of them.

A pure function of facts from the queues. An engine that has the slot is awake; the others sleep.
All times are Unix seconds of one clock.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Demand:
    """What waits for an engine: the highest priority among it (0 is the highest), since when the
    oldest request waits, and the earliest deadline of those that are next."""

    priority: int
    since: float
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class Member:
    """An engine that shares the accelerator. `running` of its requests run; `ended` is when its
    last turn ended."""

    engine_id: str
    demand: Demand | None = None
    running: int = 0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """The present turn: `holder` has had the slot since `since`. If the slot is free, `holder` is
    None. `last` had it before."""

    holder: str | None = None
    since: float = 0.0
    last: str | None = None


@dataclass(frozen=True, slots=True)
class TurnBounds:
    """Seconds that an engine with work is awake at least, and at most while others wait."""

    min_awake: float = 5.0
    max_awake: float = 60.0


def next_holder(
    members: Sequence[Member], turn: Turn, bounds: TurnBounds, now: float
) -> str | None:
    """The engine that should have the slot: the holder, or one that it should be left to.

    None if the slot is free and nothing waits. The holder keeps it while nothing waits for others.
    It leaves it when it has nothing to do, after `max_awake`, and after `min_awake` if what waits
    for another one is more urgent than what waits for it.
    """
    patience = bounds.max_awake * max(1, len(members) - 1)

    def urgency(member: Member) -> tuple[float, ...]:
        """Sorts members: those that were passed over for too long, then by priority, by deadlines
        that would be missed in another one's turn, and by age."""
        demand = member.demand
        if demand is None:
            return (2.0,)
        waits = max(demand.since, member.ended)
        if now - waits >= patience:
            return (0.0, waits)
        deadline = demand.deadline if demand.deadline - now < bounds.max_awake else math.inf
        return (1.0, demand.priority, deadline, demand.since)

    waiting = [each for each in members if each.demand is not None]
    others = [each for each in waiting if each.engine_id not in (turn.holder, turn.last)]
    if turn.holder is not None:
        others = [each for each in waiting if each.engine_id != turn.holder]
    first = min(others or (waiting if turn.holder is None else ()), key=urgency, default=None)
    if turn.holder is None or first is None:
        return turn.holder if first is None else first.engine_id
    own = next((each for each in members if each.engine_id == turn.holder), Member(turn.holder))
    awake = now - turn.since
    if own.demand is None and not own.running:
        return first.engine_id
    if awake < bounds.min_awake:
        return turn.holder
    if awake >= bounds.max_awake or urgency(first) < urgency(own):
        return first.engine_id
    return turn.holder


@dataclass(frozen=True, slots=True)
class SwitchTimes:
    """Seconds that an engine waits at most for its running requests before it sleeps, and that it
    takes to wake."""

    finish: float
    wake: float


_EPSILON = 1e-6  # seconds


def time_to_turn(
    engine_id: str,
    members: Sequence[Member],
    turn: Turn,
    bounds: TurnBounds,
    now: float,
    times: SwitchTimes,
) -> float:
    """Seconds until a member that sleeps is awake, by `next_holder`, if what waits for each member
    stays as it is; less if others run out of work before. 0 if nothing waits for this one."""
    known = {member.engine_id: member for member in members}
    if engine_id not in known or known[engine_id].demand is None:
        return 0.0
    at = now
    while turn.holder != engine_id:
        holder = next_holder(list(known.values()), turn, bounds, at)
        assert holder is not None, "something waits"
        if turn.holder is None:
            turn = Turn(holder, at, turn.last)
            at += times.wake
        elif holder == turn.holder:
            at = min(each for each in _changes(known.values(), turn, bounds) if each > at)
            at += _EPSILON
        else:
            leaver = known.get(turn.holder, Member(turn.holder))
            if leaver.running or leaver.demand is not None:
                at += times.finish
            known[leaver.engine_id] = replace(leaver, ended=at)
            turn = Turn(None, 0.0, leaver.engine_id)
    return at - now


def _changes(members: Collection[Member], turn: Turn, bounds: TurnBounds) -> list[float]:
    """When the decision about a turn may change though nothing else does."""
    waiting = [member for member in members if member.demand is not None]
    patience = bounds.max_awake * max(1, len(members) - 1)
    found = [turn.since + bounds.min_awake, turn.since + bounds.max_awake]
    for member in waiting:
        assert member.demand is not None
        found.append(max(member.demand.since, member.ended) + patience)
        found.append(member.demand.deadline - bounds.max_awake)
    return found
