"""The contract of counting a key's usage, in memory and over real Valkeys.

To let time pass, tests move the clock of the memory backend, and the stored times in Valkey, which
has its own clock.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as Lost

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
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.limits import RedisKeyUsage
from headrace_common.wire import keys
from headrace_testing.backends import OverRedis
from headrace_testing.memory_queue.limits import MemoryKeyUsage
from headrace_testing.redis_sets import ClusterSet
from headrace_testing.valkey import ValkeyServer

KEY = "a-key"
# Between two commands over Valkey a little time passes by itself.
CLOSE = 0.5
DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Counted:
    usage: KeyUsage
    other: KeyUsage
    """Another gateway's."""
    advance: Callable[[float], Awaitable[None]]
    next_day: Callable[[], Awaitable[int]]
    """Lets midnight pass; returns what must be added to numbers of days that are known."""

    async def reserve(
        self, request_id: str, rates: Rates, tokens: int = 0, daily: DayTokens = NO_TOKENS
    ) -> Reservation:
        return await self.usage.reserve(KEY, request_id, rates, tokens, daily)

    async def spend(self, request_id: str, rates: Rates, daily: DayTokens, used: DayTokens) -> None:
        reserved = await self.reserve(request_id, rates, daily=daily)
        assert reserved.refused is None
        settlement = Settlement(
            reserved=0,
            used=0,
            duration_ms=1,
            day=reserved.day,
            reserved_daily=daily,
            used_daily=used,
        )
        await self.usage.settle(KEY, request_id, rates, settlement)

    async def settle(self, request_id: str, rates: Rates, **changes: int) -> None:
        ended = {"reserved": 0, "used": 0, "duration_ms": 1000, **changes}
        counted = bool(ended.pop("counted", 1))
        settlement = Settlement(
            reserved=ended["reserved"],
            used=ended["used"],
            duration_ms=ended["duration_ms"],
            counted=counted,
        )
        await self.usage.settle(KEY, request_id, rates, settlement)


SERVERS = {"redis": "valkey_server", "cluster": "cluster_set"}


@pytest.fixture(params=["memory", *SERVERS])
async def counted(request: pytest.FixtureRequest) -> AsyncIterator[Counted]:
    if request.param == "memory":
        now = [1000.0]
        usage = MemoryKeyUsage(lambda: now[0])

        async def pass_by(seconds: float) -> None:
            now[0] += seconds

        async def to_next_day() -> int:
            now[0] += DAY_S - now[0] % DAY_S
            return 0

        yield Counted(usage, usage, pass_by, to_next_day)
        return
    server: ValkeyServer | ClusterSet = request.getfixturevalue(SERVERS[request.param])
    redis_backend = OverRedis(server.url)
    await redis_backend.wipe()

    async def age(seconds: float) -> None:
        ms = int(seconds * 1000)
        await redis_backend.client.command("HINCRBY", keys.key_usage(KEY), "at", -ms)
        for lease in await redis_backend.client.command("ZRANGE", keys.key_leases(KEY), 0, -1):
            await redis_backend.client.command("ZINCRBY", keys.key_leases(KEY), -ms, lease)

    async def age_a_day() -> int:
        await redis_backend.client.command("HINCRBY", keys.key_usage(KEY), "dy", -1)
        return -1

    yield Counted(
        RedisKeyUsage(redis_backend.connect()),
        RedisKeyUsage(redis_backend.connect()),
        age,
        age_a_day,
    )
    await redis_backend.close()


async def test_a_minutes_requests_may_be_sent_at_once_but_no_more(counted: Counted) -> None:
    rates = Rates(requests=3)
    left = [(await counted.reserve(f"r{i}", rates)).requests.remaining for i in range(3)]
    refused = await counted.reserve("r3", rates)

    assert left == [2, 1, 0]
    assert (refused.refused, refused.used) == (RateLimit.REQUESTS, 3)
    assert refused.retry_after == pytest.approx(20, abs=CLOSE)
    assert refused.requests.reset == pytest.approx(60, abs=CLOSE)


async def test_a_client_that_waits_for_retry_after_is_admitted(counted: Counted) -> None:
    rates = Rates(requests=3, tokens=60)
    for number in range(3):
        await counted.reserve(f"r{number}", rates, 20)
    refused = await counted.reserve("r3", rates, 30)
    # the tokens need 30 s, the requests only 20 s
    assert refused.refused is RateLimit.TOKENS

    await counted.advance(refused.retry_after - 1)
    assert (await counted.reserve("r3", rates, 30)).refused is RateLimit.TOKENS
    await counted.advance(1)
    assert (await counted.reserve("r3", rates, 30)).refused is None


async def test_all_gateways_share_one_count(counted: Counted) -> None:
    rates = Rates(requests=10)

    async def ask(usage: KeyUsage, number: int) -> bool:
        return (await usage.reserve(KEY, f"r{number}", rates, 0)).refused is None

    both = (counted.usage, counted.other)
    accepted = await asyncio.gather(*(ask(both[number % 2], number) for number in range(40)))

    assert sum(accepted) == 10


async def test_keys_are_counted_separately(counted: Counted) -> None:
    rates = Rates(requests=1)
    await counted.reserve("r0", rates)

    assert (await counted.usage.reserve("another", "r1", rates, 0)).refused is None


async def test_tokens_are_charged_as_used(counted: Counted) -> None:
    rates = Rates(tokens=1000)
    reserved = await counted.reserve("r0", rates, 600)
    await counted.settle("r0", rates, reserved=600, used=100)
    after = await counted.reserve("r1", rates, 200)

    assert reserved.tokens == Bucket(remaining=400, reset=36.0)
    assert after.tokens.remaining == pytest.approx(700, abs=20)


async def test_use_above_the_reservation_overdraws_and_is_repaid_later(counted: Counted) -> None:
    rates = Rates(tokens=60)
    await counted.reserve("r0", rates, 10)
    await counted.settle("r0", rates, reserved=10, used=180)
    refused = await counted.reserve("r1", rates, 1)

    assert (refused.refused, refused.tokens.remaining) == (RateLimit.TOKENS, 0)
    assert refused.used == pytest.approx(180, abs=1)
    assert refused.retry_after == pytest.approx(121, abs=1)


async def test_repeating_a_reservation_counts_nothing(counted: Counted) -> None:
    rates = Rates(requests=2, tokens=100, concurrency=1)
    await counted.reserve("r0", rates, 50)
    again = await counted.reserve("r0", rates, 50)

    assert again.refused is None
    assert (again.requests.remaining, again.tokens.remaining) == (1, 50)


async def test_a_request_that_was_never_accepted_is_given_back(counted: Counted) -> None:
    rates = Rates(requests=1, tokens=100, concurrency=1)
    await counted.reserve("r0", rates, 100)
    await counted.settle("r0", rates, reserved=100, used=0, counted=0)

    assert (await counted.reserve("r1", rates, 100)).refused is None


async def test_concurrency_counts_running_requests(counted: Counted) -> None:
    rates = Rates(concurrency=2)
    for number in range(2):
        assert (await counted.reserve(f"r{number}", rates)).refused is None
    refused = await counted.reserve("r2", rates)
    await counted.settle("r0", rates)

    assert (refused.refused, refused.used, refused.retry_after) == (RateLimit.CONCURRENCY, 2, 1.0)
    assert (await counted.reserve("r2", rates)).refused is None


async def test_retry_after_follows_the_usual_duration_of_requests(counted: Counted) -> None:
    rates = Rates(concurrency=2)
    await counted.reserve("r0", rates)
    await counted.settle("r0", rates, duration_ms=20_000)
    for number in (1, 2):
        await counted.reserve(f"r{number}", rates)

    assert (await counted.reserve("r3", rates)).retry_after == 10.0


async def test_slots_of_a_dead_gateway_are_free_after_the_lease(counted: Counted) -> None:
    rates = Rates(concurrency=1)
    await counted.reserve("dead", rates)
    await counted.advance(LEASE_MS / 1000 - 5)
    assert (await counted.reserve("r1", rates)).refused is RateLimit.CONCURRENCY
    await counted.advance(5)

    assert (await counted.reserve("r1", rates)).refused is None


async def test_a_renewed_slot_stays(counted: Counted) -> None:
    rates = Rates(concurrency=1)
    await counted.reserve("r0", rates)
    for _ in range(3):
        await counted.advance(LEASE_MS / 1000 - 5)
        await counted.usage.renew(KEY, ["r0"])

    assert (await counted.reserve("r1", rates)).refused is RateLimit.CONCURRENCY


async def test_an_expired_request_is_still_charged(counted: Counted) -> None:
    rates = Rates(tokens=6000)
    await counted.reserve("r0", rates, 10)
    await counted.advance(LEASE_MS / 1000 + 1)
    await counted.settle("r0", rates, reserved=10, used=5010)

    assert (await counted.reserve("r1", rates, 0)).tokens.remaining == pytest.approx(1000, abs=100)


async def test_a_limit_that_was_lowered_holds_at_once(counted: Counted) -> None:
    for number in range(5):
        await counted.reserve(f"r{number}", Rates(requests=10))

    assert (await counted.reserve("r5", Rates(requests=5))).refused is RateLimit.REQUESTS


async def test_a_days_output_is_refused_until_midnight(counted: Counted) -> None:
    rates = Rates(output_tokens_per_day=100)
    await counted.spend("r0", rates, DayTokens(50, 80), DayTokens(50, 60))
    refused = await counted.reserve("r1", rates, daily=DayTokens(5, 41))

    assert (refused.refused, refused.used) == (RateLimit.OUTPUT_DAY, 60)
    assert 0 < refused.retry_after <= DAY_S
    assert (await counted.reserve("r2", rates, daily=DayTokens(5, 40))).refused is None
    await counted.next_day()
    assert (await counted.reserve("r1", rates, daily=DayTokens(5, 41))).refused is None


async def test_a_days_prompts_are_counted_apart(counted: Counted) -> None:
    rates = Rates(prompt_tokens_per_day=100, output_tokens_per_day=10)
    await counted.spend("r0", rates, DayTokens(60, 10), DayTokens(60, 0))

    refused = await counted.reserve("r1", rates, daily=DayTokens(41, 10))
    assert (refused.refused, refused.used) == (RateLimit.PROMPT_DAY, 60)
    assert (await counted.reserve("r2", rates, daily=DayTokens(40, 10))).refused is None


async def test_a_request_over_midnight_counts_on_the_day_it_ends(counted: Counted) -> None:
    rates = Rates(output_tokens_per_day=100)
    reserved = await counted.reserve("r0", rates, daily=DayTokens(0, 90))
    day = reserved.day + await counted.next_day()
    settlement = Settlement(
        reserved=0,
        used=0,
        duration_ms=1,
        day=day,
        reserved_daily=DayTokens(0, 90),
        used_daily=DayTokens(0, 70),
    )
    await counted.usage.settle(KEY, "r0", rates, settlement)

    refused = await counted.reserve("r1", rates, daily=DayTokens(0, 31))
    assert (refused.refused, refused.used) == (RateLimit.OUTPUT_DAY, 70)


async def test_what_is_used_of_a_day_is_kept_to_its_end(over_redis: OverRedis) -> None:
    usage = RedisKeyUsage(over_redis.connect())
    rates = Rates(output_tokens_per_day=100)
    await usage.reserve(KEY, "r0", rates, 0, DayTokens(0, 5))
    kept = await over_redis.client.command("PTTL", keys.key_usage(KEY))
    seconds, _ = await over_redis.client.command("TIME")

    assert kept / 1000 == pytest.approx(DAY_S - int(seconds) % DAY_S + 600, abs=5)


async def test_a_settlement_whose_reply_is_lost_is_done_once(over_redis: OverRedis) -> None:
    rates = Rates(tokens=60_000)
    connection = over_redis.connect()
    usage = RedisKeyUsage(connection)
    await usage.reserve(KEY, "r0", rates, 0)
    scripts = await connection.scripts()
    run, failures = scripts.run, [True]

    async def lossy(name: str, names: list[str], args: list[object]) -> object:
        reply = await run(name, names, args)  # type: ignore[arg-type]
        if failures and failures.pop():
            raise Lost("the reply is lost")
        return reply

    scripts.run = lossy  # type: ignore[method-assign, assignment]
    await usage.settle(KEY, "r0", rates, Settlement(reserved=0, used=30_000, duration_ms=1))

    left = (await usage.reserve(KEY, "r1", rates, 0)).tokens.remaining
    assert left == pytest.approx(30_000, abs=2000)


async def test_nothing_is_left_of_an_idle_key(over_redis: OverRedis) -> None:
    usage = RedisKeyUsage(over_redis.connect())
    await usage.reserve(KEY, "r0", Rates(requests=1), 0)

    names = (keys.key_usage(KEY), keys.key_leases(KEY))
    ttls = [await over_redis.client.command("PTTL", name) for name in names]

    assert 0 < ttls[0] <= 60_000 + 600_000
    assert 0 < ttls[1] <= LEASE_MS


async def test_unreachable_redis_is_reported() -> None:
    connection = Connection(ConnectionConfig(url="redis://127.0.0.1:1/0"))
    with pytest.raises(BackendUnavailable):
        await RedisKeyUsage(connection).reserve(KEY, "r0", Rates(requests=1), 0)
    await connection.close()


@given(
    limit=st.integers(1, 50),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 100)), min_size=1, max_size=40),
)
def test_no_minute_gets_more_than_two_minutes_worth(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    """The bound of a token bucket: over t seconds at most a full bucket and what fills up
    meanwhile."""
    now = [0.0]
    usage = MemoryKeyUsage(lambda: now[0])
    allowed: list[float] = []

    async def ask() -> None:
        for number, (pause, burst) in enumerate(steps):
            now[0] += pause
            for index in range(burst):
                name = f"{number}.{index}"
                if (await usage.reserve(KEY, name, Rates(requests=limit), 0)).refused is None:
                    allowed.append(now[0])

    asyncio.run(ask())

    for start in allowed:
        within = [at for at in allowed if start <= at <= start + 60]
        assert len(within) <= 2 * limit
