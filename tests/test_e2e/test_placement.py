"""Prompts go to the engine that has most of them cached, or to another one if that engine does not
take them."""

import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from headrace_testing.processes import Starter, until
from headrace_testing.stack import MODEL, EngineProcess, GatewayProcess, Stack

SALTS = 20  # enough that both engines get some
PROMPT = list(range(3, 163))
PLACED = "headrace_gateway_placement_tokens_total"
CACHED = 144  # complete blocks before the last token


@pytest.fixture
def stack(checkpoint: Path, tmp_path: Path, start: Starter) -> Iterator[Stack]:
    """Two engines. The first gateway always waits for a request's engine, the second only 10 ms."""
    stack = Stack(checkpoint, tmp_path, start=start)
    try:
        for _ in range(2):
            stack.add_engine("--lease", "600")
        stack.add_gateway("--placement-steal-after", "600")
        stack.add_gateway("--placement-steal-after", "0.01")
        stack.await_engines(2)
        yield stack
    finally:
        stack.close()


def cached_tokens(url: str, salts: Iterable[int] = range(SALTS)) -> list[int]:
    """Sends the prompt with each tenant's salt; returns the number of cached tokens of each."""
    cached = []
    with httpx.Client(base_url=url, timeout=120) as client:
        for salt in salts:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "cache_salt": f"t{salt}"}
            usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
            cached.append(int(usage["prompt_tokens_details"]["cached_tokens"]))
    return cached


def taken(engine: EngineProcess, result: str) -> float:
    return engine.metric("headrace_queue_placements_total", f'result="{result}"')


def places(gateway: GatewayProcess) -> bool:
    """Whether the gateway has placed prompts, as it knows both engines; sends it one more."""
    cached_tokens(gateway.url, [SALTS])
    return PLACED in httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics").text


def placed_tokens(gateway: GatewayProcess) -> dict[str, float]:
    kinds = ("prompt", "known", "expected", "found")
    return {kind: gateway.metric(PLACED, f'kind="{kind}"') for kind in kinds}


def knows_what_is_cached(gateway: GatewayProcess) -> bool:
    """Whether the gateway knew that this prompt is cached, which engines tell after some time."""
    before = placed_tokens(gateway)["known"]
    cached_tokens(gateway.url, [SALTS])
    return placed_tokens(gateway)["known"] > before


def test_each_tenants_prompts_are_cached_by_one_engine(stack: Stack) -> None:
    first, second = stack.gateways
    assert cached_tokens(first.url) == [0] * SALTS
    assert cached_tokens(first.url) == [CACHED] * SALTS
    counts = [int(taken(engine, "placed")) for engine in stack.engines]
    assert sum(counts) == 2 * SALTS and min(counts) > 0

    frozen, other = stack.engines
    frozen.signal(signal.SIGSTOP)
    cached = cached_tokens(second.url)
    assert sorted(cached) == [0] * (counts[0] // 2) + [CACHED] * (counts[1] // 2)
    assert taken(other, "stolen") == counts[0] // 2


def test_prompts_stay_with_the_engine_that_told_of_them(
    checkpoint: Path, tmp_path: Path, start: Starter
) -> None:
    stack = Stack(checkpoint, tmp_path, start=start)
    try:
        stack.add_engine()
        stack.add_gateway("--placement-steal-after", "600")
        stack.await_engines(1)
        (gateway,) = stack.gateways
        assert cached_tokens(gateway.url, range(SALTS + 1)) == [0] * (SALTS + 1)
        stack.add_engine()
        stack.await_engines(2)
        until(lambda: places(gateway), "the gateway to place prompts")
        until(lambda: knows_what_is_cached(gateway), "the gateway to know what is cached")
        first, _ = stack.engines
        before, taken_before = placed_tokens(gateway), taken(first, "placed")
        assert cached_tokens(gateway.url) == [CACHED] * SALTS, (
            "by their beginnings, half would move"
        )
        assert taken(first, "placed") - taken_before == SALTS
        cached = CACHED * SALTS
        after = placed_tokens(gateway)
        assert {kind: after[kind] - before[kind] for kind in after} == {
            "prompt": len(PROMPT) * SALTS,
            "known": cached,
            "expected": cached,
            "found": cached,
        }
    finally:
        stack.close()
