"""An engine with speculation gives the same streams as one without, even if it is killed."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.engine.engine import Engine
from headrace_testing.engines import engine_config, make_runner, request, run
from headrace_testing.processes import frozen, until
from headrace_testing.stack import MODEL, EngineProcess, Stack

SPECULATION = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
STREAMS = 18
TOKENS = 400
PROMPTS = [[30, 31, 32, 33 + number] * 4 for number in range(STREAMS)]
SAMPLING: dict[str, Any] = {"temperature": 0.3, "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture
def speculating(stack: Stack) -> Iterator[EngineProcess]:
    """One more engine, which speculates, beside those that do not."""
    engine = stack.add_engine("--speculative-config", json.dumps(SPECULATION))
    stack.await_engines(len(stack.engines))
    yield engine
    until(stack.queue_is_empty, "the queue to be empty")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The outputs of an engine in this process that does not speculate."""
    engine = Engine(engine_config(checkpoint, num_blocks=2048), make_runner(checkpoint))
    found = run(
        engine,
        [
            request(f"r{seed}", prompt, SamplingParams(**SAMPLING), seed=seed)
            for seed, prompt in enumerate(PROMPTS)
        ],
    )
    return [found[f"r{seed}", 0].token_ids for seed in range(STREAMS)]


async def stream(client: httpx.AsyncClient, url: str, seed: int, begun: asyncio.Event) -> list[int]:
    tokens: list[int] = []
    body = {"model": MODEL, "prompt": PROMPTS[seed], "seed": seed, "stream": True, **SAMPLING}
    body["return_token_ids"] = True
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                begun.set()
    return tokens


async def stream_all(url: str, engine: EngineProcess, stack: Stack) -> list[list[int]]:
    """Reads all streams at once.

    `engine` begins all of them, and is killed when it has accepted drafts.
    """
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    begun = [asyncio.Event() for _ in PROMPTS]
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        with frozen([other for other in stack.engines if other is not engine]):
            streams = [
                asyncio.create_task(stream(client, url, seed, event))
                for seed, event in enumerate(begun)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            await asyncio.to_thread(until, lambda: engine.metric(accepted) > 0, "accepted drafts")
            await asyncio.to_thread(stack.retire, engine)
        return await asyncio.gather(*streams)


def test_streams_are_the_same_with_speculation_and_after_a_move_to_an_engine_without(
    stack: Stack, speculating: EngineProcess, expected: list[list[int]]
) -> None:
    found = asyncio.run(stream_all(stack.gateways[0].url, speculating, stack))
    assert found == expected
