"""The gateway's application over real sockets, with an engine that answers from a script."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from headrace_common.errors import FailureCode, HeadraceError, RequestFailed
from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.base import CanaryPlan, EngineStatus, QueueDepth, QueuePosition
from headrace_common.protocol.limits import KeyUsage
from headrace_common.protocol.live import LiveStore
from headrace_common.protocol.redis.clock import RedisClock
from headrace_common.text.tokenizer import Tokenizer
from headrace_common.wire.messages import GenerateRequest, Logprobs
from headrace_gateway.console.engine_supervisor import EngineSupervisor
from headrace_gateway.http.app import AppDependencies, create_app
from headrace_gateway.http.server import GatewayServer, listen, server_config
from headrace_gateway.limits.api_keys import KeyFile
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Discovered, Models
from headrace_gateway.queue_client.client import Delta
from headrace_gateway.settings import GatewaySettings

from .tokenizers import byte_level_tokenizer, write_checkpoint

MODEL = "tiny"
ANSWER = "Once upon a time there was a stream."
MAX_MODEL_LEN = 512
# No test waits for a drain; a grammar's check starts its process in time on a busy machine.
USUAL: Mapping[str, Any] = {"drain_timeout": 0.0, "grammar_timeout": 60.0}

Script = Callable[[GenerateRequest], Sequence[Delta]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ScriptedEngine:
    """The queue and an engine in one: answers `ANSWER`, or what `script` returns.

    Before each delta it waits for `gate`, so that a test can hold an answer where it wants.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        """Resets the fakes to their first state."""
        self.script: Script = self.say(ANSWER)
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: HeadraceError | None = None
        self.failure: RequestFailed | None = None
        self.submitted: list[GenerateRequest] = []
        self.stopped: list[tuple[str, int]] = []
        self.cancelled = asyncio.Event()
        self.cancellations: list[str] = []
        self.statuses: list[EngineStatus] = [engine_status()]
        self.unreachable: Exception | None = None
        self.waiting_at: QueuePosition | None = None

    def say(self, text: str, *, eos: bool = True) -> Script:
        """A script that answers `text`: one token in each delta, choices in turn.

        The answer ends with an end-of-sequence token, or at max_tokens.
        """

        def script(request: GenerateRequest) -> list[Delta]:
            ids = self.tokenizer.encode(text)
            if eos:
                ids.append(self.tokenizer.eos_token_ids[0])
            ids = ids[: request.sampling.max_tokens]
            return [
                self._delta(request, choice, index, ids)
                for index in range(len(ids))
                for choice in range(request.sampling.n)
            ]

        return script

    def _delta(
        self, request: GenerateRequest, choice: int, index: int, ids: Sequence[int]
    ) -> Delta:
        ended = None
        if index == len(ids) - 1:
            ended = "stop" if ids[-1] in self.tokenizer.eos_token_ids else "length"
        return Delta(
            choice=choice,
            token_ids=(ids[index],),
            logprobs=_logprobs(request, ids[index]),
            finish_reason=ended,
            cached_tokens=2,
        )

    async def submit(self, request: GenerateRequest) -> "ScriptedGeneration":
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(request)
        return ScriptedGeneration(self, request)

    async def engines(self, model: str) -> Sequence[EngineStatus]:
        if self.unreachable is not None:
            raise self.unreachable
        return [status for status in self.statuses if status.model == model]

    async def canary_plan(self, model: str) -> CanaryPlan:
        return CanaryPlan()

    async def queue_positions(
        self, request_ids: Sequence[str], model: str
    ) -> list[QueuePosition | None]:
        if self.unreachable is not None:
            raise self.unreachable
        return [self.waiting_at] * len(request_ids)

    async def depth(self, model: str) -> QueueDepth:
        return QueueDepth(waiting=0, waiting_tokens=0, pending=0, oldest_age=0.0)


class ScriptedGeneration:
    def __init__(self, engine: ScriptedEngine, request: GenerateRequest) -> None:
        self._engine = engine
        self._request = request
        self._ended = False
        self._open = set(range(request.sampling.n))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._engine.script(self._request):
            await asyncio.sleep(0)  # as a queue does
            await self._engine.gate.wait()
            if delta.choice not in self._open:
                continue
            if delta.finish_reason is not None:
                self._open.discard(delta.choice)
            self._ended = not self._open
            yield delta
        if self._engine.failure is not None:
            self._ended = True
            raise self._engine.failure

    async def stop_choice(self, choice: int, tokens: int) -> None:
        self._engine.stopped.append((self._request.request_id, choice))
        self._open.discard(choice)
        self._ended = not self._open

    async def cancel(self) -> None:
        if not self._ended:
            self._ended = True
            self._engine.cancellations.append(self._request.request_id)
            self._engine.cancelled.set()

    def leave(self) -> None:
        self._ended = True


def _logprobs(request: GenerateRequest, token_id: int) -> tuple[Logprobs, ...] | None:
    count = request.sampling.logprobs
    if count is None:
        return None
    others = [(token_id, -0.5), (token_id + 1, -1.5), (token_id + 2, float("-inf"))]
    return (Logprobs(-0.5, 1, tuple(others[:count])),)


def failed(code: FailureCode, message: str = "it failed") -> RequestFailed:
    return RequestFailed(code, message)


def engine_status(**changes: Any) -> EngineStatus:
    status: dict[str, Any] = {
        "engine_id": "e.1",
        "model": MODEL,
        "max_model_len": MAX_MODEL_LEN,
        "running": 0,
        "capacity": 16,
        "kv_utilization": 0.0,
        "tokens_per_second": 0.0,
        "last_step_age": 0.0,
        "draining": False,
        "version": "1",
    }
    return EngineStatus(**{**status, **changes})


def gateway_checkpoint(folder: Path) -> Path:
    return write_checkpoint(
        folder,
        byte_level_tokenizer(),
        config={"vocab_size": 512, "max_position_embeddings": 4096},
        eos_token="<|im_end|>",
    )


@dataclass(slots=True)
class Gateway:
    """A running application and its address."""

    port: int
    engine: ScriptedEngine
    app: FastAPI
    server: GatewayServer
    http: httpx.AsyncClient
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "Hello world", **fields}
        return await self.http.post("/v1/completions", json=body)

    async def is_idle(self) -> bool:
        """Whether no request is being served."""
        return not self.server.server_state.tasks

    def forget_engines(self) -> None:
        """Makes the gateway read the list of engines again at once."""
        self.app.state.services.engines.forget()

    def connect(self) -> AbstractAsyncContextManager[Streams]:
        return connected(self.port)


def say(gateway: Gateway, text: str) -> None:
    """Makes the engine answer `text` to each request."""
    gateway.engine.script = gateway.engine.say(text)


def prompt_of(gateway: Gateway) -> str:
    """The prompt that the engine received last, including special tokens."""
    ids = gateway.engine.submitted[-1].prompt_token_ids
    return gateway.engine.tokenizer.decode(ids, skip_special_tokens=False)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Streams]:
    """A raw connection, which is closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with closing(writer):
        yield reader, writer


@asynccontextmanager
async def serve(
    folder: Path,
    engine: ScriptedEngine | None = None,
    *,
    keys: KeyFile | None = None,
    usage: KeyUsage | None = None,
    clock: RedisClock | None = None,
    live: LiveStore | None = None,
    supervisor: EngineSupervisor | None = None,
    discovered: Discovered | None = None,
    adapter_control: AdapterControl | None = None,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """The application of a checkpoint folder on a free port of loopback."""
    given = {**USUAL, **settings}
    chosen = GatewaySettings(model=str(folder), served_model_name=MODEL, port=0, **given)
    served = Models(load_static(chosen), discovered)
    engine = engine or ScriptedEngine(served.get(MODEL).tokenizer)
    deps = AppDependencies(
        served=served,
        client=engine,
        queue=engine,
        keys=keys,
        usage=usage,
        clock=clock or RedisClock(),
        live=live,
        supervisor=supervisor,
        adapter_control=adapter_control,
    )
    app = create_app(chosen, deps)
    async with running(app, chosen) as (server, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            yield Gateway(port, engine, app, server, http)


@asynccontextmanager
async def running(
    app: FastAPI, settings: GatewaySettings
) -> AsyncIterator[tuple[GatewayServer, int]]:
    """Serves an application in this event loop until the block ends."""
    server = GatewayServer(
        server_config(app, settings),
        on_drain=lambda: app.state.services.pipeline.drain.begin(settings.drain_timeout),
    )
    with listen(settings) as listener:
        port = listener.getsockname()[1]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with asyncio.timeout(30):
            while not server.started:
                assert not serving.done(), serving.exception()
                await asyncio.sleep(0)
        try:
            yield server, port
        finally:
            if not server.should_exit:  # a second time would leave the application as it is
                server.stop()
            await serving


def events(text: str) -> Iterator[dict[str, Any]]:
    """The data of each event of a stream except the final [DONE]."""
    for block in text.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])
