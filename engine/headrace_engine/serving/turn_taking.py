"""Takes turns with the engines that share the accelerator: awake with the slot, asleep without.

    no slot, asleep  --- the slot is free, and it is this engine's turn --->  slot, asleep: wakes
    slot, awake      --- another engine's turn ---------------------------->  slot, falls asleep
    slot, asleep: does not wake  ------------------------------------------>  leaves the slot

So at any time one engine has memory on the accelerator, unless Redis was unreachable for it alone.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.slots import Slot, SlotAction, SlotView
from headrace_common.protocol.turns import Demand, SwitchTimes, next_holder, time_to_turn

from .sharing_config import SharingConfig
from .sleeper import Sleeper

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Seconds between two looks at the slot.
INTERVAL = 0.25
# The share of its lease after which a holder that cannot renew it falls asleep.
LOST_SHARE = 0.5
NORMAL_PRIORITY = 1


class TurnTaking:
    """One engine's part in a group. Made when the engine has the slot, and is awake.

    `time_to_turn` is in how many seconds the engine will be awake at the latest, if what waits for
    all engines stays as it is; 0 if it is awake, or has nothing to do. It does not know how long
    another engine takes to fall asleep.
    """

    def __init__(
        self,
        slot: Slot,
        config: SharingConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._slot, self._config = slot, config
        self._clock, self._pause = clock, sleep
        self._has_slot = True
        self._renewed_at = clock()
        self._woken_at: float | None = None  # set while it wakes
        self._waking_s = 0.0  # how long that took the last time
        self.time_to_turn = 0.0

    async def keep(
        self,
        sleeper: Sleeper,
        draining: Callable[[], bool],
        running: Callable[[], int],
        on_turn: Callable[[float], None],
    ) -> None:
        """Takes turns. A draining engine takes no slot, and leaves it to others that need it.

        Calls `on_turn` at the start of each turn, with the seconds that the oldest request, or all
        that came after the turn before, waited for it.
        """
        while True:
            waited = await self.turn(sleeper, draining=draining(), running=running())
            if waited is not None:
                on_turn(waited)
            await self._pause(INTERVAL)

    async def turn(self, sleeper: Sleeper, *, draining: bool, running: int) -> float | None:
        """Looks once at the slot, and does what it says; returns how long the engine's work waited
        for a turn that begins now."""
        try:
            demand = None if draining else await self._slot.demand()
            if not self._has_slot:
                return await self._watch(sleeper, demand)
            if self._wakes(sleeper):
                await self._take(demand, 0)
            elif sleeper.level is not None:
                await self._slot.act(SlotAction.LEAVE, demand)
                self._has_slot = False
            else:
                await self._keep(sleeper, demand, running)
        except BackendUnavailable as error:
            logger.warning("slot not renewed", extra={"error": str(error)})
            if self._has_slot and self._clock() - self._renewed_at > self._patience:
                sleeper.ask(self._config.level, 0.0)  # before another engine may take it
        return None

    def _wakes(self, sleeper: Sleeper) -> bool:
        """Whether the engine, which has the slot, is about to be awake; notes how long it took."""
        if sleeper.level is not None and (sleeper.wanted is None or sleeper.moving):
            return True
        if self._woken_at is not None:
            self._waking_s = self._clock() - self._woken_at
            self._woken_at, self.time_to_turn = None, 0.0
        return False

    @property
    def _patience(self) -> float:
        return self._config.lease * LOST_SHARE

    async def _watch(self, sleeper: Sleeper, demand: Demand | None) -> float | None:
        view = await self._slot.act(SlotAction.WATCH, demand)
        self.time_to_turn = self._time_to_turn(view)
        if sleeper.level is None or view.turn.holder is not None or demand is None:
            return None
        if self._turn_of(view) != self._slot.engine_id:
            return None
        view = await self._take(demand, 0)
        if not self._has_slot:
            return None
        self._woken_at = self._clock()
        sleeper.ask(None)
        own = next(each for each in view.members if each.engine_id == self._slot.engine_id)
        return max(0.0, view.now - max(demand.since, own.ended))

    def _time_to_turn(self, view: SlotView) -> float:
        times = SwitchTimes(self._config.timeout, self._waking_s)
        bounds, name = self._config.bounds, self._slot.engine_id
        return time_to_turn(name, view.members, view.turn, bounds, view.now, times)

    async def _take(self, demand: Demand | None, running: int) -> SlotView:
        """Takes or keeps the slot."""
        asked = self._clock()
        view = await self._slot.act(SlotAction.TAKE, demand, running)
        self._has_slot = view.turn.holder == self._slot.engine_id
        self._renewed_at = asked
        return view

    async def _keep(self, sleeper: Sleeper, demand: Demand | None, running: int) -> None:
        view = await self._take(demand, running)
        if not self._has_slot:
            logger.warning("slot lost", extra={"holder": view.turn.holder})
            sleeper.ask(self._config.level, 0.0)
        elif self._turn_of(view) != self._slot.engine_id:
            sleeper.ask(self._config.level, self._config.timeout)

    def _turn_of(self, view: SlotView) -> str | None:
        return next_holder(view.members, view.turn, self._config.bounds, view.now)


async def load_in_turn(
    slot: Slot,
    config: SharingConfig,
    load: Callable[[], T],
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> T:
    """Waits for the slot and loads the model in another thread, since that takes the accelerator.

    The engine has the slot afterwards. While it waits, it counts as one with a request.
    """
    first = await _act(slot, SlotAction.WATCH, None, sleep)
    demand, view = Demand(NORMAL_PRIORITY, first.now), first
    while view.turn.holder != slot.engine_id:
        turn = next_holder(view.members, view.turn, config.bounds, view.now)
        mine = view.turn.holder is None and turn == slot.engine_id
        view = await _act(slot, SlotAction.TAKE if mine else SlotAction.WATCH, demand, sleep)
        await sleep(INTERVAL)
    logger.info("slot taken, model is loaded")
    keeping = asyncio.create_task(_hold(slot, sleep))
    try:
        return await asyncio.to_thread(load)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _hold(slot: Slot, sleep: Callable[[float], Awaitable[object]]) -> None:
    while True:
        await _act(slot, SlotAction.TAKE, None, sleep)
        await sleep(INTERVAL)


async def _act(
    slot: Slot,
    action: SlotAction,
    demand: Demand | None,
    sleep: Callable[[float], Awaitable[object]],
) -> SlotView:
    """Acts as soon as Redis answers."""
    while True:
        try:
            return await slot.act(action, demand)
        except BackendUnavailable as error:
            logger.warning("slot not reached, tried again", extra={"error": str(error)})
        await sleep(INTERVAL)
