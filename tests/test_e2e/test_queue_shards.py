"""Real gateways distribute requests over the shards that real engines report, even while the number
of shards changes. All tests of this folder that use the same stack run over several shards as well.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from headrace_common.wire.keys import ENDED_TTL_MS, GROUP, ShardKeys, shard_of
from headrace_testing.greedy import GreedyCase, clear_cases
from headrace_testing.processes import Starter, frozen, until
from headrace_testing.stack import MODEL, Stack
from headrace_testing.streams import Crowd

ENGINES = GATEWAYS = 2
SHARDS = 3
SLOTS = 4  # of an engine
STREAMS, TOKENS = 24, 160
FORGOTTEN_MS = 1000


def test_requests_go_to_all_shards(stack: Stack) -> None:
    for gateway in stack.gateways[:GATEWAYS]:
        until(goes_to(gateway.url, {0, 1, 2}), "an answer from each shard")


def goes_to(url: str, shards: set[int]) -> Callable[[], bool]:
    """Returns a condition that sends a request and tells whether the latest ones went to just these
    shards."""
    seen: list[int] = []

    def ask() -> bool:
        body = {"model": MODEL, "prompt": [3, 4, 5], "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200
        seen.append(shard_of(answer.headers["x-request-id"]))
        return set(seen[-2 * SHARDS :]) == shards and len(seen) >= 2 * SHARDS

    return ask


@pytest.fixture(scope="module")
def long_cases(checkpoint: Path) -> list[GreedyCase]:
    return clear_cases(checkpoint, STREAMS, TOKENS)


@pytest.mark.parametrize(("before", "after"), [(SHARDS, 1), (1, SHARDS)])
def test_the_number_of_shards_changes_under_load(
    before: int,
    after: int,
    checkpoint: Path,
    tmp_path: Path,
    start: Starter,
    long_cases: list[GreedyCase],
) -> None:
    stack = Stack(checkpoint, tmp_path, start=start, queue_shards=before)
    try:
        add_engines(stack)
        for _ in range(GATEWAYS):
            stack.add_gateway()
        stack.await_engines(ENGINES)
        assert asyncio.run(replace_engines(stack, after, long_cases)) == []
        for gateway in stack.gateways:
            until(goes_to(gateway.url, set(range(after))), f"requests to go to {after} shards")
        until(lambda: left_behind(stack) == [], "no more than statistics in Redis")
        forget_the_dead(stack)
    finally:
        stack.close()


def add_engines(stack: Stack) -> None:
    """Starts engines whose leases never expire, so that a paused engine loses nothing."""
    for _ in range(ENGINES):
        stack.add_engine("--lease", "600", "--max-num-seqs", str(SLOTS), "--drain-timeout", "0")


async def replace_engines(stack: Stack, shards: int, cases: Sequence[GreedyCase]) -> list[str]:
    """Replaces the engines by ones with other shards while requests run and wait in all shards.

    Returns what is wrong with the answers.
    """
    urls = [gateway.url for gateway in stack.gateways]
    slots = ENGINES * SLOTS
    running, waiting = Crowd(urls, cases[:slots]), Crowd(urls, cases[slots:])
    crowds = [asyncio.create_task(running.run())]
    await aside(lambda: all(each.token_ids for each in running.received), "each to have a token")
    former = list(stack.engines)
    with frozen(former):
        crowds.append(asyncio.create_task(waiting.run()))
        await aside(lambda: all(waits(stack)), "requests to wait in each shard")
        for engine in former:
            engine.signal(signal.SIGTERM)
        stack.engines.clear()
        stack.queue_shards = shards
        add_engines(stack)
        await asyncio.to_thread(stack.await_engines, 2 * ENGINES)
    for engine in former:
        assert await asyncio.to_thread(engine.wait) == 0
    await asyncio.gather(*crowds)
    return running.mistakes() + waiting.mistakes()


async def aside(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(until, condition, what)


def waits(stack: Stack) -> list[int]:
    """The number of requests that wait in each shard in use."""
    with redis.Redis.from_url(stack.redis_url) as client:
        counts: list[Any] = [
            client.hget(ShardKeys(MODEL, number).stats, "w") for number in range(stack.queue_shards)
        ]
    return [int(count or 0) for count in counts]


def left_behind(stack: Stack) -> list[str]:
    """The keys of the upper shards that belong to requests, except records that will expire and the
    ledger."""
    found: list[str] = []
    with redis.Redis.from_url(stack.redis_url, decode_responses=True) as client:
        for names in upper_shards():
            empty = [queue for queue in names.queues if client.xlen(queue) == 0]
            kept = {names.stats, names.wakeups, names.counters, names.ledger, *empty}
            there = set(client.scan_iter(f"*{names.tag}*", 10_000))
            found += [key for key in there - kept if not is_ended(client, names, key)]
    return found


def is_ended(client: redis.Redis, names: ShardKeys, key: str) -> bool:
    """Whether the key is the record of an ended request, which will expire."""
    if not key.startswith(names.records):
        return False
    left: Any = client.pttl(key)
    return client.hget(key, "st") == "done" and 0 < left <= ENDED_TTL_MS


def forget_the_dead(stack: Stack) -> None:
    """Runs an engine that soon takes silent engines for dead, and forgets those that are."""
    until(lambda: all(idle > FORGOTTEN_MS for idle in dead_consumers(stack)), "all to be silent")
    stack.add_engine("--lease", str(FORGOTTEN_MS / 10_000), "--beat-interval", "0.05")
    until(lambda: dead_consumers(stack) == [], "no consumer of an engine that is gone")


def dead_consumers(stack: Stack) -> list[int]:
    """For each dead engine, the milliseconds since it last read one of the upper shards."""
    alive = {str(engine.pid) for engine in stack.engines}
    with redis.Redis.from_url(stack.redis_url, decode_responses=True) as client:
        queues = [queue for names in upper_shards() for queue in names.queues]
        groups: Any = [client.xinfo_consumers(q, GROUP) for q in queues if client.exists(q)]
    known = [consumer for group in groups for consumer in group]
    return [each["idle"] for each in known if each["name"].split(".")[-2] not in alive]


def upper_shards() -> list[ShardKeys]:
    return [ShardKeys(MODEL, number) for number in range(1, SHARDS)]
