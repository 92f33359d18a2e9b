"""A client that goes away ends its request down to the engine, streaming or not.

The requests would run for many seconds; after the disconnect the engine generates no more tokens
for them.
"""

import asyncio

import httpx
import pytest

from headrace_testing.processes import until
from headrace_testing.single import LONG, SingleStack
from headrace_testing.stack import MODEL


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_disconnect_reaches_the_engine(
    single: SingleStack, n: int, path: str, stream: bool
) -> None:
    before = single.output_tokens()
    asyncio.run(leave(single, path, n, stream=stream))
    until(lambda: single.engine.idle, "the engine to stop")
    assert single.output_tokens() - before < n * LONG / 2
    until(single.queue_is_empty, "the queue to be empty")
    assert single.complete().status_code == 200


async def leave(single: SingleStack, path: str, n: int, *, stream: bool) -> None:
    """Requests very many tokens and disconnects when the engine works on them."""
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": [5]}
    body = {"model": MODEL, "max_tokens": LONG, "ignore_eos": True, "n": n, "stream": stream}
    async with httpx.AsyncClient(base_url=single.gateway.url, timeout=60) as client:
        asking = asyncio.create_task(client.post(f"/v1/{path}", json={**body, **prompt}))
        busy = f"{n} sequences to run"
        await asyncio.to_thread(until, lambda: asking.done() or single.running() == n, busy)
        assert not asking.done(), asking.result().text
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
