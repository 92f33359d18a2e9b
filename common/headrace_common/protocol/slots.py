"""The slot of an accelerator that several engines share: a lease, which one of them has at a time.

Engines of different models cannot read each other's queues, so each engine says in the slot what
waits for it. The decision is made in `turns`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from .turns import Demand, Member, Turn


class SlotAction(StrEnum):
    """What an engine does besides telling what waits for it."""

    WATCH = "watch"
    TAKE = "take"  # takes the slot if it is free, or renews the lease
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class SlotView:
    """The slot and its members at the time `now` of the queue's clock."""

    now: float
    turn: Turn
    members: Sequence[Member]


class Slot(Protocol):
    """The slot of one group, for one engine. Raises BackendUnavailable."""

    engine_id: str

    async def demand(self) -> Demand | None:
        """What waits in the queue of the engine's model, or was given back to it."""

    async def act(self, action: SlotAction, demand: Demand | None, running: int = 0) -> SlotView:
        """Acts, and tells the others what waits for this engine. May be repeated.

        An engine that has not acted for a lease is no member any more, and loses the slot as soon
        as another one takes it.
        """
