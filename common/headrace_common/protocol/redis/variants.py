"""What is meant for a model's canary over Redis, how often its answers were those of the stable
engines, and which side has engines."""

import time
from typing import Any

from ...errors import MessageError
from ...wire.keys import ShardKeys
from ..base import CanaryPlan
from ..variants import CANARY, MAX_PERCENT, Agreement, EngineSide
from .client.client import Command
from .client.connection import Connection

PERCENT = "percent"
_COMPARISONS = "comparisons"  # per minute
_EQUAL, _DIFFERENT = "equal", "different"  # answers that were compared
_BEATS = ("beat.stable", "beat.canary")  # Redis' time of each side's last beat, in ms
INTERVAL = 1.0  # seconds between two beats of a side by one engine


class RedisCanary:
    """Reads and writes what is known of a model's canary. Raises BackendUnavailable."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def plan(self, model: str) -> CanaryPlan:
        """What is meant for the canary."""
        key = ShardKeys(model).canary
        percent, comparisons = await self._command("HMGET", key, PERCENT, _COMPARISONS)
        try:
            return CanaryPlan(percent_of(percent) or 0.0, _whole(comparisons))
        except MessageError:  # engines may write anything there
            return CanaryPlan()

    async def set_plan(self, model: str, plan: CanaryPlan | None) -> None:
        """Writes the plan; with None there is no canary."""
        key = ShardKeys(model).canary
        if plan is None:
            await self._command("HDEL", key, PERCENT, _COMPARISONS, _EQUAL, _DIFFERENT)
            return
        values = (f"{plan.percent:g}", plan.comparisons_per_minute)
        await self._command("HSET", key, PERCENT, values[0], _COMPARISONS, values[1])

    async def may_compare(self, model: str, interval_ms: int) -> bool:
        """Claims the next comparison of all gateways: True at most once in an interval."""
        key = ShardKeys(model).comparing
        return bool(await self._command("SET", key, b"", "PX", interval_ms, "NX"))

    async def compared(self, model: str, *, equal: bool) -> None:
        """Counts an answer of the canary that was compared."""
        field = _EQUAL if equal else _DIFFERENT
        await self._command("HINCRBY", ShardKeys(model).canary, field, 1)

    async def agreement(self, model: str) -> Agreement:
        """The counts since the model got a canary, also of canaries before the present one."""
        key = ShardKeys(model).canary
        equal, different = [await self._command("HGET", key, n) for n in (_EQUAL, _DIFFERENT)]
        try:
            return Agreement(_whole(equal), _whole(different))
        except MessageError:
            return Agreement()

    async def _command(self, *command: Any) -> Any:
        return await self._connection.attempt(lambda: self._connection.client.command(*command))


def percent_of(data: bytes | None) -> float | None:
    """Reads a percentage; None if there is none. Raises MessageError."""
    if data is None:
        return None
    try:
        found = float(data)
    except ValueError as error:
        raise MessageError("percentage of a canary: is no number") from error
    if not 0 <= found <= MAX_PERCENT:
        raise MessageError(f"percentage of a canary: must be 0 to {MAX_PERCENT}")
    return found


def _whole(data: bytes | None) -> int:
    """Reads a count; 0 if there is none. Raises MessageError."""
    if data is None:
        return 0
    if not data.isdigit():
        raise MessageError("count of a canary: is no whole number")
    return int(data)


class SideBeats:
    """Tells the other side that this engine's side has an engine, and learns the same of it.

    `commands` belong in the pipeline that writes the engine's status, and `learn` gets their
    results. A side whose last beat is older than `lease_ms` has no engines.
    """

    def __init__(self, side: EngineSide, key: str, lease_ms: int) -> None:
        self._side = side
        self._key = key
        self._lease_ms = lease_ms
        self._own = _BEATS[side.variant == CANARY]
        self._at = float("-inf")

    def commands(self, now_ms: int, *, takes_work: bool) -> list[Command]:
        now = time.monotonic()
        if now - self._at < INTERVAL:
            return []
        self._at = now
        found: list[Command] = [("HMGET", self._key, PERCENT, *_BEATS)]
        if takes_work and (self._side.canary_wanted or self._side.variant == CANARY):
            found.append(("HSET", self._key, self._own, now_ms))
        return found

    def learn(self, results: list[Any], now_ms: int) -> None:
        if not results:
            return
        percent, *beats = results[0]
        is_canary = self._side.variant == CANARY
        self._side.canary_wanted = percent is not None
        other = beats[not is_canary]
        if other is None:  # before a canary, stable engines write no beats
            self._side.alone = not is_canary
        else:
            self._side.alone = now_ms - _milliseconds(other) > self._lease_ms


def _milliseconds(data: bytes) -> float:
    try:
        return float(data)
    except ValueError:
        return 0.0
