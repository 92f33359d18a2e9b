"""Sets whose members expire. Every write may be repeated."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .client.client import Command

Run = Callable[..., Awaitable[list[Any]]]


class ExpiringIndex:
    """One sorted set: members "<id>:<number>:<until>", scored by `until` (Unix seconds).

    `run` sends commands in one round trip; `clock` is Redis'. Ids have no colon. The set lives as
    long as its last member.
    """

    def __init__(self, run: Run, key: str, clock: Callable[[], float]) -> None:
        self._run, self._key, self._clock = run, key, clock

    async def put(self, name: str, until: int, number: int = 0) -> None:
        """Adds a member, or replaces the one with its id."""
        known = await self._members()
        old = [member for member in known if _id(member) == name]
        latest = max([until, *(_numbers(member)[1] for member in known)])
        commands: list[Command] = [("ZADD", self._key, until, f"{name}:{number}:{until}")]
        gone = [member for member in old if member != f"{name}:{number}:{until}"]
        if gone:
            commands.append(("ZREM", self._key, *gone))
        await self._run(*commands, ("PEXPIREAT", self._key, 1000 * latest))

    async def remove(self, name: str) -> bool:
        """Removes the member with this id; returns whether it existed."""
        gone = [member for member in await self._members() if _id(member) == name]
        if not gone:
            return False
        (removed,) = await self._run(("ZREM", self._key, *gone))
        return bool(removed)

    async def numbers(self) -> dict[str, int]:
        """The number of each id."""
        return {_id(member): _numbers(member)[0] for member in await self._members()}

    async def _members(self) -> Sequence[str]:
        now = int(self._clock())
        _, found = await self._run(
            ("ZREMRANGEBYSCORE", self._key, "-inf", now), ("ZRANGE", self._key, 0, -1)
        )
        return [member.decode() for member in found]


def _id(member: str) -> str:
    return member.partition(":")[0]


def _numbers(member: str) -> tuple[int, int]:
    _, number, until = member.split(":")
    return int(number), int(until)
