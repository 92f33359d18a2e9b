"""An engine gets schemas that compile for minutes, which every gateway would refuse."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace_common.errors import FailureCode, RequestFailed
from headrace_common.protocol.base import QueueLimits
from headrace_common.sampling.params import SamplingParams
from headrace_common.structured.structured import StructuredOutputsParams
from headrace_common.text.checkpoint import demo_folder
from headrace_common.wire.messages import GenerateRequest
from headrace_gateway.queue_client.client import GenerationClient
from headrace_testing.backends import OverRedis, make_request
from headrace_testing.pool_tasks import costly_schema
from headrace_testing.processes import HeadraceProcess, Starter, until
from headrace_testing.sealed_suite import keys_of_the_suite
from headrace_testing.stack import MODEL, Stack

UNLIMITED = [
    *("--grammar-timeout", "200", "--grammar-cpu-seconds", "200", "--grammar-memory", "64GiB"),
    *("--drain-timeout", "0"),
]


@pytest.fixture
async def stack(tmp_path: Path, start: Starter) -> AsyncIterator[Stack]:
    stack = Stack(demo_folder(), tmp_path, start=start)
    yield stack
    await asyncio.to_thread(stack.close)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[GenerationClient]:
    """A gateway's client that checks nothing."""
    backend = OverRedis(stack.redis_url, ring=keys_of_the_suite())
    client = GenerationClient(backend.gateway(), QueueLimits())
    await client.start()
    yield client
    await client.close()
    await backend.close()


def structured_request(tenant: str, **structured: Any) -> GenerateRequest:
    params = StructuredOutputsParams(**structured)
    sampling = SamplingParams(max_tokens=8, structured_outputs=params, seed=1)
    return replace(make_request(), model=MODEL, tenant=tenant, sampling=sampling)


async def answer(client: GenerationClient, request: GenerateRequest) -> int:
    """Counts the tokens of an answer. Raises RequestFailed."""
    count = 0
    async with await client.submit(request) as generation:
        async for delta in generation:
            count += len(delta.token_ids)
    return count


def workers(engine: HeadraceProcess) -> dict[int, psutil.Process]:
    children = psutil.Process(engine.pid).children(recursive=True)
    return {each.pid: each for each in children if each.ppid() != engine.pid}


async def test_only_the_request_with_the_costly_grammar_fails(
    stack: Stack, client: GenerationClient
) -> None:
    engine = stack.add_engine("--grammar-timeout", "100", "--grammar-memory", "32MiB")
    with pytest.raises(RequestFailed, match=r"takes over .* to compile: have less") as caught:
        await answer(client, structured_request("hostile", json=costly_schema()))

    assert caught.value.failure is FailureCode.INVALID
    assert await answer(client, structured_request("other", regex="[a-z]{20}"))
    assert engine.alive


async def test_other_requests_continue_and_the_costly_one_ends_in_time(
    stack: Stack, client: GenerationClient
) -> None:
    engine = stack.add_engine(*UNLIMITED)
    costly = [
        asyncio.create_task(answer(client, structured_request("hostile", json=costly_schema(n))))
        for n in (40, 41, 42)
    ]
    for number in range(3):
        assert await answer(client, structured_request("other", regex=f"[a-z]{{20}}{number}"))
    assert not any(task.done() for task in costly)

    busy = workers(engine)
    for task in costly:
        task.cancel()
    assert await answer(client, structured_request("hostile", regex="[a-z]{20}"))
    await asyncio.to_thread(
        until, lambda: not busy.keys() <= workers(engine).keys(), "the abandoned work to end"
    )

    last = asyncio.create_task(
        answer(client, structured_request("hostile", json=costly_schema(43)))
    )
    assert await answer(client, structured_request("other", regex="[a-z]{21}"))
    family = workers(engine).values()
    engine.signal(signal.SIGTERM)
    assert await asyncio.to_thread(engine.wait) == 0
    await asyncio.to_thread(
        until, lambda: not any(each.is_running() for each in family), "its processes to end"
    )
    last.cancel()
    await asyncio.gather(*costly, last, return_exceptions=True)
