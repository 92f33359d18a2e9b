"""Limits of one API key over all gateways: requests and tokens per minute, concurrent requests.

Rates are token buckets (RFC 2697 section 3, with one rate: filled evenly, one minute deep), stored
as the used amount, which decays. A request's tokens are reserved before it is queued and corrected
when it has ended, so a bucket may be overdrawn; it then refills first. Concurrent requests are
counted by leases, which expire if a gateway dies. Implemented over Redis and, with the same tests,
in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

# How long a gateway may be silent before its requests no longer count as running.
LEASE_MS = 30_000
# How long the usual duration of a key's requests is remembered without further requests.
IDLE_MS = 600_000
# The weight of the last request in that duration.
WEIGHT = 0.2
MINUTE_MS = 60_000


class RateLimit(StrEnum):
    """The limits that a request may exceed."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"
    PROMPT_DAY = "prompt_tokens_per_day"
    OUTPUT_DAY = "output_tokens_per_day"


@dataclass(frozen=True, slots=True)
class DayTokens:
    """Tokens that count for the limits of a day."""

    prompt: int = 0
    output: int = 0


NO_TOKENS = DayTokens()


def _at_most(tokens: int, limit: int | None) -> int:
    return tokens if limit is None else min(tokens, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The limits of one key; None means no limit of that kind. Rates are per minute. A day begins
    at midnight UTC.
    """

    requests: int | None = None
    tokens: int | None = None
    concurrency: int | None = None
    prompt_tokens_per_day: int | None = None
    output_tokens_per_day: int | None = None

    @property
    def daily(self) -> bool:
        """Whether a limit of a day is set."""
        return (self.prompt_tokens_per_day or self.output_tokens_per_day) is not None

    def at_most_daily(self, tokens: "DayTokens") -> "DayTokens":
        """The tokens of the day to reserve for a request that may use `tokens`: one that may use
        more than the limit runs on a day of which nothing is used."""
        return DayTokens(
            _at_most(tokens.prompt, self.prompt_tokens_per_day),
            _at_most(tokens.output, self.output_tokens_per_day),
        )

    def at_most(self, tokens: int) -> int:
        """The tokens to reserve for a request that may use `tokens`."""
        return _at_most(tokens, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The remaining part of a rate, and the seconds until it is full again."""

    remaining: int
    reset: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Whether a request may proceed.

    `retry_after` is in seconds; `used` is the used part of the exceeded limit. The buckets include
    the request if it may proceed. `day` is the number of the day, in UTC, whose tokens it has
    reserved.
    """

    refused: RateLimit | None
    retry_after: float
    used: int
    requests: Bucket
    tokens: Bucket
    day: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How a request ended: the tokens reserved and used, and its duration in milliseconds.

    `counted` is False if it was never accepted; it does not count as one of the minute's requests.
    `day` and the tokens after it are for the limits of a day, and 0 without such limits.
    """

    reserved: int
    used: int
    duration_ms: int
    counted: bool = True
    day: int = 0
    reserved_daily: DayTokens = NO_TOKENS
    used_daily: DayTokens = NO_TOKENS


class KeyUsage(Protocol):
    """The usage of API keys. Raises BackendUnavailable if Redis cannot be reached."""

    async def reserve(
        self,
        key_id: str,
        request_id: str,
        rates: Rates,
        tokens: int,
        daily: DayTokens = NO_TOKENS,
    ) -> Reservation:
        """Reserves one request and its tokens, or nothing if a limit would be exceeded.

        Safe to repeat: a running request is not counted again. A bucket never holds more than one
        minute's tokens, so reserve no more than `Rates.at_most`, and `Rates.at_most_daily`.
        """

    async def settle(
        self, key_id: str, request_id: str, rates: Rates, settlement: Settlement
    ) -> None:
        """Ends a request: counts the tokens that it used, and no longer counts it as running."""

    async def renew(self, key_id: str, request_ids: Sequence[str]) -> None:
        """Renews the leases of running requests; call it every LEASE_MS / 3."""
