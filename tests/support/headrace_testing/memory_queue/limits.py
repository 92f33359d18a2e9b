"""The usage of API keys in this process, by the same rules as the scripts."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.limits import (
    LEASE_MS,
    MINUTE_MS,
    NO_TOKENS,
    WEIGHT,
    Bucket,
    DayTokens,
    RateLimit,
    Rates,
    Reservation,
    Settlement,
)

SLACK = 1e-6
DAY_MS = 86_400_000


@dataclass(slots=True)
class _Usage:
    """The usage of one key; times are in milliseconds."""

    requests: float = 0.0
    tokens: float = 0.0
    at: float = 0.0
    duration: float = 0.0
    leases: dict[str, float] = field(default_factory=dict)
    day: int = 0
    daily: DayTokens = DayTokens()

    def forget(self, rates: Rates, now: float) -> None:
        ms = max(0.0, now - self.at)
        self.requests = _forgotten(self.requests, rates.requests, ms)
        self.tokens = _forgotten(self.tokens, rates.tokens, ms)
        self.at = now
        if self.day != now // DAY_MS:
            self.day, self.daily = int(now // DAY_MS), DayTokens()

    def spend(self, tokens: DayTokens) -> None:
        prompt, output = self.daily.prompt + tokens.prompt, self.daily.output + tokens.output
        self.daily = DayTokens(max(0, prompt), max(0, output))

    def refusal(
        self, rates: Rates, tokens: int, daily: DayTokens, now: float
    ) -> tuple[RateLimit | None, float, float]:
        """The limit with the longest wait, that wait in ms, and the used amount of the limit."""
        found: list[tuple[float, RateLimit, float]] = []
        running = len(self.leases)
        if rates.concurrency and running >= rates.concurrency:
            wait = max(1000.0, self.duration / rates.concurrency)
            found.append((wait, RateLimit.CONCURRENCY, running))
        for limit, used, rate, cost in (
            (RateLimit.REQUESTS, self.requests, rates.requests, 1),
            (RateLimit.TOKENS, self.tokens, rates.tokens, tokens),
        ):
            if rate and used + cost > rate + SLACK:
                found.append((_time_of(used + cost - rate, rate), limit, used))
        for limit, spent, most, more in (
            (RateLimit.PROMPT_DAY, self.daily.prompt, rates.prompt_tokens_per_day, daily.prompt),
            (RateLimit.OUTPUT_DAY, self.daily.output, rates.output_tokens_per_day, daily.output),
        ):
            if most and spent + more > most:
                found.append((DAY_MS - now % DAY_MS, limit, spent))
        if not found:
            return None, 0.0, 0.0
        wait, limit, used = max(found, key=lambda each: each[0])
        return limit, wait, used


class MemoryKeyUsage:
    """See KeyUsage. `clock` gives seconds; `available` False simulates an outage."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.available = True
        self._clock = clock
        self._keys: defaultdict[str, _Usage] = defaultdict(_Usage)

    async def reserve(
        self,
        key_id: str,
        request_id: str,
        rates: Rates,
        tokens: int,
        daily: DayTokens = NO_TOKENS,
    ) -> Reservation:
        usage, now = self._usage(key_id, rates)
        usage.leases = {rid: lapses for rid, lapses in usage.leases.items() if lapses > now}
        refused, wait, used = None, 0.0, 0.0
        if request_id not in usage.leases:
            refused, wait, used = usage.refusal(rates, tokens, daily, now)
            if refused is None:
                usage.requests += 1
                usage.tokens += tokens
                usage.spend(daily)
        if refused is None:
            usage.leases[request_id] = now + LEASE_MS
        return Reservation(
            refused=refused,
            retry_after=math.ceil(wait) / 1000,
            used=math.ceil(used - SLACK),
            requests=_bucket(usage.requests, rates.requests),
            tokens=_bucket(usage.tokens, rates.tokens),
            day=usage.day,
        )

    async def settle(
        self, key_id: str, request_id: str, rates: Rates, settlement: Settlement
    ) -> None:
        usage, _ = self._usage(key_id, rates)
        usage.leases.pop(request_id, None)
        ran = settlement.duration_ms
        if settlement.counted:
            usage.duration += (ran - usage.duration) * (WEIGHT if usage.duration else 1.0)
        else:
            usage.requests = max(0.0, usage.requests - 1)
        usage.tokens = max(0.0, usage.tokens + settlement.used - settlement.reserved)
        usage.spend(settlement.used_daily)
        if settlement.day == usage.day:
            reserved = settlement.reserved_daily
            usage.spend(DayTokens(-reserved.prompt, -reserved.output))

    async def renew(self, key_id: str, request_ids: Sequence[str]) -> None:
        self._check()
        lapses = self._clock() * 1000 + LEASE_MS
        self._keys[key_id].leases.update(dict.fromkeys(request_ids, lapses))

    def _usage(self, key_id: str, rates: Rates) -> tuple[_Usage, float]:
        self._check()
        usage, now = self._keys[key_id], self._clock() * 1000
        usage.forget(rates, now)
        return usage, now

    def _check(self) -> None:
        if not self.available:
            raise BackendUnavailable("memory: the backend is switched off")


def _forgotten(used: float, rate: int | None, ms: float) -> float:
    return max(0.0, used - rate * ms / MINUTE_MS) if rate else 0.0


def _time_of(amount: float, rate: int) -> float:
    return max(0.0, amount) * MINUTE_MS / rate


def _bucket(used: float, rate: int | None) -> Bucket:
    if not rate:
        return Bucket(remaining=0, reset=0.0)
    remaining = max(0, math.floor(rate - used + SLACK))
    return Bucket(remaining=remaining, reset=math.ceil(_time_of(used, rate)) / 1000)
