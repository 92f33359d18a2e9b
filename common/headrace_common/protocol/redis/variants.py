"""The canary's share of a model's requests over Redis, and which side has engines."""

import time
from typing import Any

from ...errors import MessageError
from ...wire.keys import ShardKeys
from ..variants import CANARY, MAX_PERCENT, EngineSide
from .client.client import Command
from .client.connection import Connection

PERCENT = "percent"
_BEATS = ("beat.stable", "beat.canary")  # Redis' time of each side's last beat, in ms
INTERVAL = 1.0  # seconds between two beats of a side by one engine


class RedisCanary:
    """Reads and writes a model's share. Raises BackendUnavailable."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def percent(self, model: str) -> float:
        """The percentage of the model's requests that is meant for a canary."""
        data = await self._command("HGET", ShardKeys(model).canary, PERCENT)
        try:
            return percent_of(data) or 0.0
        except MessageError:  # engines may write anything there
            return 0.0

    async def set_percent(self, model: str, percent: float | None) -> None:
        """Sets it; with None there is no canary."""
        key = ShardKeys(model).canary
        if percent is None:
            await self._command("HDEL", key, PERCENT)
        else:
            await self._command("HSET", key, PERCENT, f"{percent:g}")

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
