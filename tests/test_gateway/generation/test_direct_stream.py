"""Streams that are written directly when tokens arrive have the same bytes as streams that a task
writes."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fastapi import FastAPI
from starlette.types import Message

from headrace_common.text.tokenizer import Tokenizer
from headrace_common.wire.messages import Control, GenerateRequest, Logprobs, StopChoice, Tokens
from headrace_gateway.http.app import AppDependencies, create_app
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models
from headrace_gateway.openai.answers import CompletionAnswer
from headrace_gateway.queue_client.client import Delta, Generation
from headrace_gateway.queue_client.generation import GenerationCallbacks
from headrace_gateway.settings import GatewaySettings
from headrace_gateway.streaming.sse import CHANNEL
from headrace_testing.gateway import MODEL, ScriptedEngine, connected, running
from headrace_testing.tool_templates import CHATML_WITH_TOOLS
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TEXT = f'Once "upon" a\ttime 🦊\n{CALL} ENDS behind'
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "x"}),
    "chat": ("/v1/chat/completions", CHAT),
    "choices": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "stop": ("/v1/completions", {"prompt": "x", "n": 2, "stop": "ENDS"}),
    "usage": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
    "ids": ("/v1/completions", {"prompt": "x", "return_token_ids": True}),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": [TOOL]}),
    "messages": ("/v1/messages", CHAT),
    "responses": ("/v1/responses", {"input": "Hi", "store": False}),
}
VARYING = re.compile(r'"(?:created|created_at)":\d+|[0-9a-f.]{32,}|call_[0-9a-f]+')


class WithoutCallbacks:
    """A generation that can only be iterated."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.stop_choice, self.cancel = generation.stop_choice, generation.cancel
        self.leave = generation.leave

    def __aiter__(self) -> AsyncIterator[Delta]:
        return aiter(self._generation)


def notify(generation: Generation) -> None:
    if (write := generation.notify()) is not None:
        write()


class HandEngine(ScriptedEngine):
    """An engine with real generations of a gateway, whose replies the test sends itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.direct = True
        self.port = 0
        self.generations: list[Generation] = []
        self.sent: list[Control] = []
        self.abandoned: list[str] = []

    async def submit(self, request: GenerateRequest) -> Any:
        loop = asyncio.get_running_loop()
        callbacks = GenerationCallbacks(
            send=lambda _engine, _model, control: self.sent.append(control),
            new_deltas=lambda generation: loop.call_soon(notify, generation),  # type: ignore[arg-type]
            ended=lambda _: None,
            abandon=self._abandon,
            lost=lambda _: None,
            ignored=lambda _: None,
            left=lambda _: None,
            given=lambda _: None,
            taken=lambda *_: None,
        )
        generation = Generation(request, callbacks, 0.0)
        self.generations.append(generation)
        return generation if self.direct else WithoutCallbacks(generation)

    async def _abandon(self, generation: Generation) -> None:
        self.abandoned.append(generation.request_id)

    async def has(self, count: int) -> bool:
        return len(self.generations) == count

    def tell(self, number: int, choice: int, index: int, ids: Sequence[int], *, last: bool) -> None:
        generation = self.generations[number]
        logprobs = None
        if generation.request.sampling.logprobs is not None:
            logprobs = tuple(Logprobs(-0.5, 1, ((each, -0.5),)) for each in ids)
        reply = Tokens(
            generation.request_id,
            1,
            choice,
            index,
            tuple(ids),
            logprobs,
            finish_reason="length" if last else None,
            cached_tokens=3,
        )
        generation.handle("e", reply, 0.0)


class FakeConnection:
    """A connection with both ways of writing, which keeps their order."""

    def __init__(self) -> None:
        self.ready = True
        self.writes = 0
        self.body = b""
        self.started = False
        self.gone = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()

    @property
    def has_reset(self) -> bool:
        return self.gone.is_set()

    @property
    def has_left(self) -> bool:
        return self.gone.is_set()

    def write(self, content: bytes) -> None:
        assert self.ready and self.started
        self.writes += 1
        self.body += content

    async def send(self, message: Message) -> None:
        await self.writable.wait()
        self.started = True
        self.body += message.get("body", b"")


Client = Callable[..., Awaitable[FakeConnection]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hand_engine(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[HandEngine, FastAPI]]:
    template = tmp_path_factory.mktemp("template") / "chat_template.jinja"
    template.write_text(CHATML_WITH_TOOLS, encoding="utf-8")
    settings = GatewaySettings(
        chat_template=str(template),
        model=str(checkpoint),
        served_model_name=MODEL,
        tool_call_parser="hermes",
        keep_alive_interval=600,  # no comment comes in between, however slow this machine is
        port=0,
        drain_timeout=0,
    )
    served = Models(load_static(settings))
    engine = HandEngine(served.get(MODEL).tokenizer)
    app = create_app(settings, AppDependencies(served=served, client=engine, queue=engine))
    async with running(app, settings) as (_, engine.port):
        yield engine, app


@pytest.fixture
def engine(hand_engine: tuple[HandEngine, FastAPI]) -> HandEngine:
    engine, _ = hand_engine
    engine.generations, engine.sent, engine.abandoned = [], [], []
    return engine


@pytest_asyncio.fixture(loop_scope="session")
async def ask(engine: HandEngine, hand_engine: tuple[HandEngine, FastAPI]) -> AsyncIterator[Client]:
    """Sends a request; yields its connection when the engine has the request."""
    _, app = hand_engine
    tasks: list[asyncio.Task[None]] = []

    async def ask(path: str, body: dict[str, Any], *, direct: bool = True) -> FakeConnection:
        connection, engine.direct = FakeConnection(), direct
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        content = [json.dumps({"model": MODEL, limit: 200, "stream": True, **body}).encode()]

        async def receive() -> Message:
            if content:
                return {"type": "http.request", "body": content.pop(), "more_body": False}
            await connection.gone.wait()
            return {"type": "http.disconnect"}

        known = len(engine.generations)
        tasks.append(asyncio.create_task(app(scope(path, connection), receive, connection.send)))
        await eventually(lambda: engine.has(known + 1), 60)
        await quiet()
        return connection

    yield ask
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def scope(path: str, connection: FakeConnection) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"x")],
        "client": ("test", 0),
        "server": ("test", 0),
        "state": {CHANNEL: connection},
    }


async def quiet() -> None:
    """Lets all tasks run that do not wait for a socket."""
    for _ in range(30):
        await asyncio.sleep(0)


async def play(engine: HandEngine, connection: FakeConnection, number: int = -1) -> str:
    """Sends TEXT to all choices, in pieces of one, two and three tokens."""
    ids = engine.tokenizer.encode(TEXT)
    choices = engine.generations[number].request.sampling.n
    for index in range(0, len(ids), 3):
        for cut in ((0, 1), (1, 3)) if index % 2 else ((0, 3),):
            for choice in range(choices):
                first = index + cut[0]
                new = ids[first : index + cut[1]]
                if new:
                    last = first + len(new) == len(ids)
                    engine.tell(number, choice, first, new, last=last)
            await quiet()
    await quiet()
    return VARYING.sub("*", connection.body.decode())


@pytest.mark.parametrize("name", BODIES)
async def test_direct_streams_have_the_same_bytes_as_those_of_a_task(
    engine: HandEngine, ask: Client, name: str
) -> None:
    path, body = BODIES[name]

    pulled = await ask(path, body, direct=False)
    expected, stops = await play(engine, pulled), list(engine.sent)
    pushed = await ask(path, body)
    text = await play(engine, pushed)

    assert text == expected
    assert text.count("data: ") > 10, "each piece was an event"
    assert (pulled.writes, pushed.writes > 5) == (0, True), name
    assert [c.choice for c in engine.sent if isinstance(c, StopChoice)] == 2 * [
        c.choice for c in stops if isinstance(c, StopChoice)
    ]
    assert engine.generations[-1].ended


async def test_a_task_writes_to_a_slow_client_until_it_has_caught_up(
    engine: HandEngine, ask: Client
) -> None:
    connection = await ask(*BODIES["completion"])
    ids = engine.tokenizer.encode("one two three four five six seven eight")

    def tell(index: int) -> None:
        engine.tell(0, 0, index, ids[index : index + 1], last=index == len(ids) - 1)

    async def say(first: int, last: int) -> int:
        for index in range(first, last):
            tell(index)
            await quiet()
        return connection.writes

    assert await say(0, 4) == 3  # the first opened the stream
    connection.ready = False
    connection.writable.clear()
    assert await say(4, 8) == 3
    connection.ready = True
    connection.writable.set()
    await quiet()
    assert await say(8, len(ids)) > 3
    texts = re.findall(r'"text":"([^"]*)"', connection.body.decode())
    assert "".join(texts) == engine.tokenizer.decode(ids)
    assert connection.body.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_ends_its_request(engine: HandEngine, ask: Client) -> None:
    connection = await ask(*BODIES["completion"])
    ids = engine.tokenizer.encode("one two")
    for index in range(2):
        engine.tell(0, 0, index, ids[index : index + 1], last=False)
        await quiet()

    connection.gone.set()
    await quiet()

    assert engine.abandoned == [engine.generations[0].request_id]


async def test_a_fault_in_one_stream_ends_that_stream_alone(
    engine: HandEngine, ask: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, whole = await ask(*BODIES["completion"]), await ask(*BODIES["chat"])
    (token,) = engine.tokenizer.encode("a")

    def fail(answer: CompletionAnswer, choice: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(CompletionAnswer, "text_event", fail)
    for index in range(4):
        for number in range(2):
            engine.tell(number, 0, index, [token], last=index == 3)
        await quiet()

    assert whole.body.endswith(b"data: [DONE]\n\n")
    assert b"DONE" not in broken.body
    assert engine.abandoned == [engine.generations[0].request_id]


async def test_each_of_a_connections_requests_is_written_in_its_own_answer(
    engine: HandEngine,
) -> None:
    engine.direct = True
    (token,) = engine.tokenizer.encode("a")
    content = json.dumps({"prompt": "x", "stream": True, "max_tokens": 9}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content

    async with connected(engine.port) as (reader, writer):
        writer.write(2 * request)  # the second waits for the first
        for number in range(2):
            await eventually(partial(engine.has, number + 1), 60)
            for index in range(9):
                engine.tell(number, 0, index, [token], last=index == 8)
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                answer = (await reader.readuntil(b"0\r\n\r\n")).decode()
            assert answer.startswith("HTTP/1.1 200")
            assert answer.count("[DONE]") == 1
            texts = re.findall(r'"text":"(a*)"', answer)
            assert "".join(texts) == "a" * 9
            assert re.findall("[0-9a-f]{32}", answer)[0] in engine.generations[number].request_id
