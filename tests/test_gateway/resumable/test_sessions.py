"""Sessions alone: a session that outlives its readers ends in the queue, too."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_common.protocol.store import StoredRequest
from headrace_common.wire.messages import GenerateRequest
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models
from headrace_gateway.queue_client.client import Delta
from headrace_gateway.resumable.sessions import Sessions
from headrace_gateway.settings import GatewaySettings
from headrace_testing.backends import make_request
from headrace_testing.gateway import MODEL
from headrace_testing.memory_queue.backend import MemoryBackend
from headrace_testing.memory_queue.store import MemoryRequestStore
from headrace_testing.wire_messages import STORED


@pytest.fixture
def served(checkpoint: Path) -> Models:
    return Models(load_static(GatewaySettings(model=str(checkpoint), served_model_name=MODEL)))


class SlowlyCancelled:
    """A client and its only generation, whose cancellation reaches the queue some time later."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def submit(self, request: GenerateRequest) -> "SlowlyCancelled":
        return self

    async def __aiter__(self) -> AsyncIterator[Delta]:
        yield Delta(choice=0, token_ids=(1,))
        await self._ended.wait()

    async def stop_choice(self, choice: int, tokens: int) -> None: ...

    async def cancel(self) -> None:
        self._ended.set()
        for _ in range(10):
            await asyncio.sleep(0)  # as a queue does
        self.cancelled.set()

    def leave(self) -> None: ...


async def test_a_cancellation_reaches_the_queue_although_the_session_has_ended(
    served: Models,
) -> None:
    async def settle(_stored: StoredRequest, _output_bytes: int) -> None: ...

    client = SlowlyCancelled()
    sessions = Sessions(client, MemoryRequestStore(MemoryBackend()), settle)
    requests = (replace(make_request(), window_ms=1, keep_ms=1),)
    stored = replace(STORED, requests=requests, stop=())

    (accepted,) = await sessions.open(stored, served.get(MODEL).tokenizer, fresh=True)
    await accepted.generation.cancel()

    async with asyncio.timeout(30):
        await client.cancelled.wait()
