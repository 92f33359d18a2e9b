"""Enforces each API key's limits: refuses what exceeds them, and charges the actual usage.

All gateways share the counts. One round trip reserves a request before it is queued; its actual
usage is written after the answer, without delaying it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_common.config.api_keys import KeyLimits
from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.limits import (
    LEASE_MS,
    NO_TOKENS,
    Bucket,
    DayTokens,
    KeyUsage,
    RateLimit,
    Rates,
    Reservation,
    Settlement,
)
from headrace_common.sampling.params import SamplingParams
from headrace_common.wire.keys import new_request_id
from headrace_common.wire.messages import GenerateRequest

from ..errors import NO_RETRY, ApiError
from .tenants import Caller

logger = logging.getLogger(__name__)

# Output tokens that are reserved for a choice whose length the request does not bound.
ASSUMED_OUTPUT = 256
# Longer than the tokenisation of any text.
TOKENIZING_S = 600.0
RENEW_S = LEASE_MS / 3000
CLOSE_S = 2.0

_UNITS = {
    RateLimit.REQUESTS: "requests per min (RPM)",
    RateLimit.TOKENS: "tokens per min (TPM)",
    RateLimit.CONCURRENCY: "requests at a time",
    RateLimit.PROMPT_DAY: "prompt tokens per day (UTC)",
    RateLimit.OUTPUT_DAY: "output tokens per day (UTC)",
}


class RateLimited(ApiError):
    """A key has used up one of its limits. `kind` names the limit as OpenAI does."""


@dataclass(slots=True, eq=False)
class Grant:
    """The reservation of one HTTP request, until all its requests in the queue have ended.

    `deadline` and `started` are in seconds of the clock. `waiting` are its requests that are not in
    the queue yet, `running` those that may still use tokens. `refused` says that
    the queue refused one of them, which cancels the others, and has accepted none since.
    """

    key_id: str
    request_ids: tuple[str, ...]
    rates: Rates
    reserved: int
    started: float
    deadline: float
    waiting: set[str]
    headers: Mapping[str, str]
    running: set[str] = field(default_factory=set)
    used: int = 0
    day: int = 0
    reserved_daily: DayTokens = NO_TOKENS
    prompt_tokens: int = 0  # of its requests in the queue
    output_tokens: int = 0  # that they have made
    submitted: bool = False
    refused: bool = False
    settled: bool = False

    def submit(self, request: GenerateRequest) -> None:
        """Notes that one of its requests is in the queue now."""
        self.submitted, self.refused = True, False
        self.waiting.discard(request.request_id)
        self.running.add(request.request_id)
        self.used += len(request.prompt_token_ids)
        self.prompt_tokens += len(request.prompt_token_ids)

    @property
    def daily(self) -> DayTokens:
        return DayTokens(self.prompt_tokens, self.output_tokens)

    def receive(self, tokens: int) -> None:
        """Notes output tokens of one of its requests."""
        self.used += tokens
        self.output_tokens += tokens


class RateLimits:
    """The limits of all keys at this gateway. `clock` gives Unix seconds. Use from one event
    loop."""

    def __init__(self, usage: KeyUsage, clock: Callable[[], float] = time.time) -> None:
        self._usage = usage
        self._clock = clock
        self._grants: dict[str, Grant] = {}  # by request id in the queue
        self._running: set[Grant] = set()
        self._one_writer = asyncio.Lock()  # a lease must not be renewed after its end
        self._renewer: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Requests of keys with limits that have not ended."""
        return len(self._running)

    async def reserve(
        self, caller: Caller, sampling: SamplingParams, requests: Sequence[GenerateRequest]
    ) -> Grant | None:
        """Reserves a request; returns None for a key without limits. `sampling` is the client's.

        Raises RateLimited, and BackendUnavailable if Redis is unreachable.
        """
        limits = caller.key.limits
        if limits.unlimited:
            return None
        most = limits.tokens_per_minute
        prompt = sum(len(request.prompt_token_ids) for request in requests)
        if most is not None and prompt > most:
            raise _too_large(most, prompt)
        tokens = sum(_estimate(request, sampling) for request in requests)
        return await self._grant(
            caller,
            [request.request_id for request in requests],
            tokens=tokens,
            daily=DayTokens(prompt, tokens - prompt),
            deadline=max(request.deadline_ms for request in requests) / 1000,
        )

    async def reserve_tokenizing(self, caller: Caller) -> Grant | None:
        """Reserves a request that only tokenises text; returns None for a key without limits.

        Its tokens are charged at its end, when they are known: the bucket may then be overdrawn,
        and the next request waits. Raises the errors of `reserve`.
        """
        if caller.key.limits.unlimited:
            return None
        deadline = self._clock() + TOKENIZING_S
        return await self._grant(caller, [new_request_id()], tokens=1, deadline=deadline)

    async def _grant(
        self,
        caller: Caller,
        request_ids: Sequence[str],
        *,
        tokens: int,
        deadline: float,
        daily: DayTokens = NO_TOKENS,
    ) -> Grant:
        rates = _rates(caller.key.limits)
        tokens, daily = rates.at_most(tokens), rates.at_most_daily(daily)
        reservation = await self._usage.reserve(caller.key.id, request_ids[0], rates, tokens, daily)
        if reservation.refused is not None:
            raise _refusal(reservation, rates, tokens, daily)
        grant = Grant(
            key_id=caller.key.id,
            request_ids=tuple(request_ids),
            rates=rates,
            reserved=tokens,
            started=self._clock(),
            deadline=deadline,
            waiting=set(request_ids),
            day=reservation.day,
            reserved_daily=daily,
            headers=_headers(reservation, rates),
        )
        self._track(grant)
        return grant

    def find(self, request_id: str) -> Grant | None:
        """Returns the grant of a request in the queue, if it has one."""
        return self._grants.get(request_id)

    def ended(self, grant: Grant, request_id: str) -> None:
        """Notes that a request uses no more tokens; after the last one, settles the grant."""
        grant.running.discard(request_id)
        if not grant.running and not grant.waiting:
            self._settle(grant)

    def answered(self, grant: Grant, *, success: bool) -> None:
        """Notes that the HTTP request has ended, so that it queues nothing more."""
        grant.waiting.clear()
        if not grant.running:
            self._settle(grant, counted=success or grant.submitted)

    async def close(self) -> None:
        """Writes usage that is not yet written, for at most CLOSE_S."""
        if self._renewer is not None:
            self._renewer.cancel()
            await asyncio.gather(self._renewer, return_exceptions=True)
        for grant in list(self._running):
            self._settle(grant)
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.flush()
        except TimeoutError:
            logger.warning("usage of API keys not written in time")

    async def flush(self) -> None:
        """Waits until the usage of all ended requests is written, or failed to be written."""
        await asyncio.gather(*self._background)

    # Leases

    def _track(self, grant: Grant) -> None:
        for request_id in grant.waiting:
            self._grants[request_id] = grant
        self._running.add(grant)
        if self._renewer is None or self._renewer.done():
            self._renewer = asyncio.create_task(self._renew(), name="key leases")

    async def _renew(self) -> None:
        """Renews leases while a request runs."""
        while self._running:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def renew(self) -> None:
        """Renews the leases of running requests; ends those that are past their deadline."""
        now = self._clock()
        for grant in [grant for grant in self._running if grant.deadline + RENEW_S < now]:
            self._settle(grant)
        by_key: dict[str, list[str]] = {}
        async with self._one_writer:
            for grant in self._running:
                by_key.setdefault(grant.key_id, []).append(grant.request_ids[0])
            for key_id, request_ids in by_key.items():
                await self._quietly(self._usage.renew(key_id, request_ids))

    def _settle(self, grant: Grant, *, counted: bool = True) -> None:
        if grant.settled:
            return
        grant.settled = True
        self._running.discard(grant)
        for request_id in grant.request_ids:
            self._grants.pop(request_id, None)
        settlement = Settlement(
            reserved=grant.reserved,
            used=0 if grant.refused else grant.used,
            day=grant.day,
            reserved_daily=grant.reserved_daily,
            used_daily=NO_TOKENS if grant.refused else grant.daily,
            duration_ms=max(0, int((self._clock() - grant.started) * 1000)),
            counted=counted and not grant.refused,
        )
        task = asyncio.create_task(self._write(grant, settlement))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _write(self, grant: Grant, settlement: Settlement) -> None:
        async with self._one_writer:
            await self._quietly(
                self._usage.settle(grant.key_id, grant.request_ids[0], grant.rates, settlement)
            )

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        """Writes without failing: on an error reserved tokens stay charged, and a lease lapses."""
        try:
            await work
        except BackendUnavailable as error:
            logger.warning(
                "redis unavailable, usage of an API key not written", extra={"error": str(error)}
            )


def _rates(limits: KeyLimits) -> Rates:
    return Rates(
        requests=limits.requests_per_minute,
        tokens=limits.tokens_per_minute,
        concurrency=limits.concurrency,
        prompt_tokens_per_day=limits.prompt_tokens_per_day,
        output_tokens_per_day=limits.output_tokens_per_day,
    )


def _estimate(request: GenerateRequest, sampling: SamplingParams) -> int:
    """Returns prompt plus output tokens; an unbounded request is not charged the whole context."""
    requested = ASSUMED_OUTPUT if sampling.max_tokens is None else sampling.max_tokens
    most = request.sampling.max_tokens
    output = requested if most is None else min(requested, most)
    return len(request.prompt_token_ids) + sampling.branches * output


def _refusal(reservation: Reservation, rates: Rates, tokens: int, daily: DayTokens) -> RateLimited:
    limit = reservation.refused
    assert limit is not None, "a refusal names its limit"
    most = getattr(rates, limit.value)
    asked = {
        RateLimit.TOKENS: tokens,
        RateLimit.PROMPT_DAY: daily.prompt,
        RateLimit.OUTPUT_DAY: daily.output,
    }
    requested = asked.get(limit, 1)
    wait = reservation.retry_after
    return RateLimited(
        429,
        f"Rate limit reached on {_UNITS[limit]}: Limit {most}, Used {reservation.used}, "
        f"Requested {requested}. Please try again in {go_duration(wait)}.",
        kind=limit.value,
        code="rate_limit_exceeded",
        retry_after=wait,
        headers={**_headers(reservation, rates), "retry-after-ms": str(int(wait * 1000))},
    )


def _too_large(limit: int, requested: int) -> RateLimited:
    """Returns the error for a prompt that is more than a minute's tokens: waiting does not help."""
    return RateLimited(
        429,
        f"Request too large on {_UNITS[RateLimit.TOKENS]}: Limit {limit}, Requested {requested}. "
        "Shorten the prompt.",
        kind=RateLimit.TOKENS.value,
        code="rate_limit_exceeded",
        headers=NO_RETRY,
    )


def _headers(reservation: Reservation, rates: Rates) -> dict[str, str]:
    """Returns OpenAI's headers for the limits that the key has."""
    headers: dict[str, str] = {}
    for name, limit, bucket in (
        ("requests", rates.requests, reservation.requests),
        ("tokens", rates.tokens, reservation.tokens),
    ):
        if limit is not None:
            headers |= _bucket_headers(name, limit, bucket)
    return headers


def _bucket_headers(name: str, limit: int, bucket: Bucket) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(limit),
        f"x-ratelimit-remaining-{name}": str(bucket.remaining),
        f"x-ratelimit-reset-{name}": go_duration(bucket.reset),
    }


def go_duration(seconds: float) -> str:
    """Writes a duration as Go does, for OpenAI's headers: `12ms`, `1.5s`, `6m0s`."""
    ms = round(seconds * 1000)
    if ms == 0:
        return "0s"
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    text = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
