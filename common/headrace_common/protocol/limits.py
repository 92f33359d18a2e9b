"""What one API key may use over all gateways: requests and tokens a minute, requests at once.

Rates are token buckets (RFC 2697 section 3, with one rate: filled evenly, one minute deep), kept as
what was used and is not yet forgotten. A request's tokens are reserved before it is queued and put
right when it ended, so a bucket may be overdrawn; then it fills up first. What runs at once is
counted by leases, which lapse where a gateway dies. Over Redis and, with the same tests, in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

# How long a gateway may be silent before its requests no longer count as running.
LEASE_MS = 30_000
# How long the usual duration of a key's requests is remembered when nothing is asked.
IDLE_MS = 600_000
# The weight of the last request in that duration.
WEIGHT = 0.2
MINUTE_MS = 60_000


class Limit(StrEnum):
    """Which limit a request would be over."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The limits of one key; None: none of that kind. The rates are by the minute."""

    requests: int | None = None
    tokens: int | None = None
    concurrency: int | None = None

    def at_most(self, tokens: int) -> int:
        """What can be reserved for a request that may use so many."""
        return tokens if self.tokens is None else min(tokens, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What is left of a rate, and the seconds until all of it is there again."""

    remaining: int
    reset: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Whether a request may go on. `retry_after` in seconds; `used` is of the limit it is over.

    The buckets are as they are with the request, where it may go on.
    """

    refused: Limit | None
    retry_after: float
    used: int
    requests: Bucket
    tokens: Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How a request ended: the tokens reserved and used, and how long it ran in milliseconds.

    `counted` False: it was never accepted, and is not one of the minute's requests.
    """

    reserved: int
    used: int
    duration_ms: int
    counted: bool = True


class KeyUsage(Protocol):
    """Raises BackendUnavailable where Redis cannot be reached."""

    async def reserve(self, key_id: str, request_id: str, rates: Rates, tokens: int) -> Reservation:
        """Takes one request and its tokens, or nothing where a limit would be passed.

        Safe to repeat: a request that runs is not counted again. More tokens than a minute's are
        never there, so reserve no more than `Rates.at_most`.
        """

    async def settle(
        self, key_id: str, request_id: str, rates: Rates, settlement: Settlement
    ) -> None:
        """Ends a request: its tokens are as used, its place is free."""

    async def renew(self, key_id: str, request_ids: Sequence[str]) -> None:
        """Says that these requests run; each LEASE_MS / 3."""
