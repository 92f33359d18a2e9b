"""A gateway that stores requests, over a queue in memory and a scripted engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from headrace_common.protocol.base import QueueLimits
from headrace_common.text.tokenizer import Tokenizer
from headrace_common.wire.messages import GenerateRequest
from headrace_gateway.http.app import AppDependencies, DurableStores, create_app
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models
from headrace_gateway.queue_client.client import ClientConfig, GenerationClient
from headrace_gateway.settings import GatewaySettings

from .backends import MODEL, InMemory
from .fake_engine import FakeEngine
from .gateway import USUAL, running


@dataclass(slots=True)
class KeptGateway:
    """`texts` are the answers, one after the other; the last one is repeated."""

    url: str
    http: httpx.AsyncClient
    engine: FakeEngine
    tokenizer: Tokenizer
    texts: list[str]
    requests: list[GenerateRequest]

    def say(self, *texts: str) -> None:
        self.texts[:] = texts
        self.requests.clear()

    @property
    def prompt(self) -> str:
        """The prompt of the last request."""
        ids = self.requests[-1].prompt_token_ids
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def script(self, request: GenerateRequest) -> Sequence[int]:
        self.requests.append(request)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        return [*self.tokenizer.encode(text), self.tokenizer.eos_token_ids[0]]


def _models(settings: GatewaySettings) -> Models:
    return Models(load_static(settings), aliases=settings.model_aliases)


@asynccontextmanager
async def serve_kept(folder: Path, **fields: Any) -> AsyncIterator[KeptGateway]:
    """The application of a checkpoint folder, whose model is called MODEL."""
    given = {**USUAL, **fields}
    settings = GatewaySettings(model=str(folder), served_model_name=MODEL, port=0, **given)
    backend, served = InMemory(), _models(settings)
    queue = backend.gateway()
    config = ClientConfig(beat_interval=0.05, silence=1.0, recheck=0.2, longest_recheck=0.5)
    client = GenerationClient(queue, QueueLimits(), config=config)
    await client.start()
    durable = DurableStores(backend.request_store(), queue, backend.accounts())
    deps = AppDependencies(served=served, client=client, queue=queue, durable=durable)
    app = create_app(settings, deps)
    engine = FakeEngine(backend.engine(), MODEL, token_delay=0.0, beat_interval=0.2)
    engine_task = asyncio.create_task(engine.run())
    async with running(app, settings) as (_, port):
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            tokenizer = served.get(MODEL).tokenizer
            gateway = KeptGateway(url, http, engine, tokenizer, ["Hello"], [])
            engine.script = gateway.script
            yield gateway
    engine_task.cancel()
    await asyncio.gather(engine_task, return_exceptions=True)
    await client.close()
