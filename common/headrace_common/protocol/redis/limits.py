"""Usage of API keys over Redis: a hash and a sorted set for each key, changed only by scripts."""

from collections.abc import Sequence
from typing import Any

from ...wire import keys
from ..limits import (
    IDLE_MS,
    LEASE_MS,
    NO_TOKENS,
    Bucket,
    DayTokens,
    RateLimit,
    Rates,
    Reservation,
    Settlement,
)
from .client.client import Argument
from .client.connection import Connection

TRIES = 3


class RedisKeyUsage:
    """See KeyUsage."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def reserve(
        self,
        key_id: str,
        request_id: str,
        rates: Rates,
        tokens: int,
        daily: DayTokens = NO_TOKENS,
    ) -> Reservation:
        bounds = [rates.requests or 0, rates.tokens or 0, rates.concurrency or 0]
        of_day = [rates.prompt_tokens_per_day or 0, rates.output_tokens_per_day or 0]
        arguments = [request_id, *bounds, tokens, LEASE_MS, IDLE_MS]
        arguments += [*of_day, daily.prompt, daily.output]
        reply: list[Any] = await self._connection.run(
            "reserve", _keys(key_id), arguments, tries=TRIES
        )
        refused, wait, used, requests, requests_reset, left, left_reset, day = reply
        return Reservation(
            refused=RateLimit(refused.decode()) if refused else None,
            retry_after=wait / 1000,
            used=used,
            requests=Bucket(remaining=requests, reset=requests_reset / 1000),
            tokens=Bucket(remaining=left, reset=left_reset / 1000),
            day=day,
        )

    async def settle(
        self, key_id: str, request_id: str, rates: Rates, settlement: Settlement
    ) -> None:
        arguments: list[Argument] = [
            request_id,
            rates.requests or 0,
            rates.tokens or 0,
            settlement.used - settlement.reserved,
            0 if settlement.counted else 1,
            settlement.duration_ms,
            IDLE_MS,
            settlement.day if rates.daily else "",
            settlement.used_daily.prompt,
            settlement.reserved_daily.prompt,
            settlement.used_daily.output,
            settlement.reserved_daily.output,
        ]
        again = 0

        async def once() -> None:
            nonlocal again
            repetition, again = again, 1
            scripts = await self._connection.scripts()
            await scripts.run("settle", _keys(key_id), [*arguments, repetition])

        await self._connection.attempt(once, tries=TRIES)

    async def renew(self, key_id: str, request_ids: Sequence[str]) -> None:
        names = [keys.key_leases(key_id)]
        await self._connection.run("renew", names, [LEASE_MS, *request_ids], tries=TRIES)


def _keys(key_id: str) -> list[str]:
    return [keys.key_usage(key_id), keys.key_leases(key_id)]
