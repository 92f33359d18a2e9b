"""Streams as bytes: the format on which clients and proxies rely."""

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from fastapi import Depends

from headrace_common.errors import BackendUnavailable, FailureCode
from headrace_common.protocol.base import QueuePosition
from headrace_gateway.http.routes.chat import create_chat_completion
from headrace_gateway.queue_client.client import Delta
from headrace_gateway.streaming.keep_alive import KeepAlives
from headrace_gateway.streaming.sse import EventStream
from headrace_testing.gateway import ANSWER, Gateway, events, failed, serve
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


def delta(ids: Sequence[int], finish_reason: str | None = None) -> Delta:
    return Delta(choice=0, token_ids=tuple(ids), logprobs=None, finish_reason=finish_reason)


async def test_a_chat_stream_byte_by_byte(gateway: Gateway) -> None:
    gateway.engine.script = gateway.engine.say("Hi")

    answer = await gateway.chat(stream=True, stream_options={"include_usage": True})

    rid = gateway.engine.submitted[0].request_id
    first = next(events(answer.text))
    head = (
        f'"id":"chatcmpl-{rid}","object":"chat.completion.chunk",'
        f'"created":{first["created"]},"model":"tiny",'
        f'"system_fingerprint":"{first["system_fingerprint"]}"'
    )
    tokens = gateway.engine.tokenizer.encode("Hi")
    texts = [gateway.engine.tokenizer.decode([token]) for token in tokens]
    opening = (
        f'data: {{{head},"choices":[{{"index":0,"delta":{{"role":"assistant",'
        '"content":""},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    )
    deltas = "".join(
        f'data: {{{head},"choices":[{{"index":0,"delta":{{"content":"{text}"}},'
        '"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        for text in texts
    )
    ending = (
        f'data: {{{head},"choices":[{{"index":0,"delta":{{}},'
        '"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":null}\n\n'
    )
    prompt = len(gateway.engine.submitted[0].prompt_token_ids)
    usage = (
        f'data: {{{head},"choices":[],"usage":{{"prompt_tokens":{prompt},'
        f'"completion_tokens":{len(tokens) + 1},"total_tokens":{prompt + len(tokens) + 1},'
        '"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
    )
    assert answer.text == opening + deltas + ending + usage + "data: [DONE]\n\n"
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-request-id"] == rid


async def test_usage_is_absent_unless_asked_for(gateway: Gateway) -> None:
    answer = await gateway.chat(stream=True)

    assert all("usage" not in chunk for chunk in events(answer.text))


async def test_choices_are_interleaved(gateway: Gateway) -> None:
    answer = await gateway.chat(stream=True, n=2)

    order = [chunk["choices"][0]["index"] for chunk in events(answer.text)]
    assert order[:4] == [0, 0, 1, 1]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)


@pytest.mark.parametrize("text", ["你好 🦊!", "é🙂"])
async def test_no_event_holds_half_a_character(gateway: Gateway, text: str) -> None:
    gateway.engine.script = gateway.engine.say(text)

    answer = await gateway.complete(stream=True, max_tokens=100)

    pieces = [chunk["choices"][0]["text"] for chunk in events(answer.text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("include", [True, False])
async def test_a_stop_string_over_several_tokens(
    gateway: Gateway, stream: bool, include: bool
) -> None:
    options = {"stop": ["upon a t"], "include_stop_str_in_output": include, "max_tokens": 99}

    answer = await gateway.complete(stream=stream, **options)

    bodies = list(events(answer.text)) if stream else [answer.json()]
    last = bodies[-1]["choices"][0]
    text = "".join(body["choices"][0]["text"] for body in bodies)
    assert text == ("Once upon a t" if include else "Once ")
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "upon a t")
    assert len(gateway.engine.stopped) == 1
    assert not gateway.engine.cancellations


async def test_tokens_after_a_stop_string_are_not_counted(gateway: Gateway) -> None:
    ids = gateway.engine.tokenizer.encode(ANSWER)

    gateway.engine.script = lambda _: [delta(ids, "length")]
    answer = (await gateway.complete(stop="Once", return_token_ids=True)).json()

    shown = answer["choices"][0]["token_ids"]
    assert answer["usage"]["completion_tokens"] == len(shown) < len(ids)
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_max_tokens_ends_with_length(gateway: Gateway) -> None:
    answer = (await gateway.complete(max_tokens=3)).json()

    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


class Positions:
    """A queue in which each request is the third."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def queue_positions(
        self, request_ids: Sequence[str], model: str
    ) -> list[QueuePosition | None]:
        self.asked.append(list(request_ids))
        return [QueuePosition(position=3, eta=None)] * len(request_ids)


class SilentStream(EventStream):
    """A stream that has been silent for an hour until something is written."""

    def __init__(self) -> None:
        self.written = b""

    @property
    def silent(self) -> float:
        return 0.0 if self.written else 3600.0

    @property
    def ready(self) -> bool:
        return True

    def write(self, content: bytes) -> None:
        self.written += content


async def test_positions_of_all_silent_streams_are_read_together() -> None:
    positions, streams = Positions(), [SilentStream() for _ in range(3)]
    keep_alives = KeepAlives(0.1, positions)
    with ExitStack() as stack:
        for number, stream in enumerate(streams):
            kept = keep_alives.of(stream, str(number), "m", end=b"\n", open_soon=False)
            stack.enter_context(kept)

        async def written() -> bool:
            return all(stream.written for stream in streams)

        await eventually(written)

    assert [stream.written for stream in streams] == [b": queued position=3\n\n"] * 3
    assert positions.asked == [["0", "1", "2"]]


async def test_a_waiting_stream_keeps_nothing_of_the_framework(gateway: Gateway) -> None:
    def frameworks() -> int:
        return sum(isinstance(each, AsyncExitStack) for each in gc.get_objects())

    before = frameworks()
    gateway.engine.gate.clear()
    answer = asyncio.create_task(gateway.chat(stream=True))

    async def waits_alone() -> bool:
        return bool(gateway.engine.submitted) and frameworks() == before

    await eventually(waits_alone)
    gateway.engine.gate.set()
    assert (await answer).status_code == 200


async def test_comments_keep_a_silent_stream_alive(checkpoint: Path) -> None:
    async with serve(checkpoint, keep_alive_interval=0.02) as gateway:
        gateway.engine.gate.clear()
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            silent = [await anext(lines) for _ in range(4)]
            gateway.engine.gate.set()
            rest = [line async for line in lines]

    assert silent == [": keep-alive", ""] * 2
    assert rest[-2] == "data: [DONE]"


async def test_corrupt_positions_do_not_end_the_comments(checkpoint: Path) -> None:
    async with serve(checkpoint, keep_alive_interval=0.02) as gateway:
        gateway.engine.gate.clear()
        gateway.engine.waiting_at = QueuePosition(position=3, eta=None)
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            gateway.engine.unreachable = ValueError("a priority that is no number")
            comments = 0
            async for line in lines:
                comments += line == ": keep-alive"
                if comments == 2:
                    break
            gateway.engine.gate.set()
            rest = [line async for line in lines]

    assert rest[-2] == "data: [DONE]"


@pytest.mark.parametrize(("eta", "comment"), [(11.2, " eta=12s"), (None, "")])
async def test_comments_report_the_queue_position_of_a_waiting_request(
    checkpoint: Path, eta: float | None, comment: str
) -> None:
    async with serve(checkpoint, keep_alive_interval=0.02) as gateway:
        gateway.engine.gate.clear()
        gateway.engine.waiting_at = QueuePosition(position=3, eta=eta)
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            waiting = [await anext(lines) for _ in range(2)]
            gateway.engine.unreachable = BackendUnavailable("away")
            async for line in lines:
                if line == ": keep-alive":
                    break
            gateway.engine.gate.set()
            rest = [line async for line in lines]

    assert waiting == [f": queued position=3{comment}", ""]
    assert rest[-2] == "data: [DONE]"


async def test_a_failure_travels_in_the_stream(gateway: Gateway) -> None:
    gateway.engine.script = lambda request: gateway.engine.say(ANSWER)(request)[:2]
    gateway.engine.failure = failed(FailureCode.POISONED, "it broke")

    answer = await gateway.chat(stream=True)

    last = list(events(answer.text))[-1]
    assert answer.status_code == 200
    assert last == {
        "error": {
            "message": "it broke",
            "type": "server_error",
            "param": None,
            "code": "request_failed",
        }
    }
    assert "[DONE]" not in answer.text


async def test_the_answer_waits_for_the_queue_under_open_headers(gateway: Gateway) -> None:
    gateway.engine.gate.clear()
    body = {"prompt": "x", "stream": True}
    async with gateway.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200  # the headers came before anything was generated
        gateway.engine.gate.set()
        text = (await answer.aread()).decode()

    assert json.loads(text.splitlines()[0][6:])["object"] == "text_completion"


async def test_a_slow_reader_is_cut_off(checkpoint: Path) -> None:
    async with serve(checkpoint, write_timeout=0.1) as gateway:
        ids = tuple(gateway.engine.tokenizer.encode("x" * 400))
        gateway.engine.script = lambda _: [delta(ids)] * 100_000
        # Small buffers in the kernel, so that it soon takes no more.
        gateway.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", gateway.port))
        body = b'{"prompt": "x", "stream": true}'
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )

        async with asyncio.timeout(60):
            await gateway.engine.cancelled.wait()
        await eventually(gateway.is_idle)
        client.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_response_is_never_sent_is_cancelled(
    checkpoint: Path, stream: bool
) -> None:
    async def fails_after_the_endpoint() -> AsyncIterator[None]:
        yield
        raise RuntimeError("the framework failed")

    async with serve(checkpoint) as gateway:
        gateway.app.post(
            "/unsent", dependencies=[Depends(fails_after_the_endpoint, scope="function")]
        )(create_chat_completion)

        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        answer = await gateway.http.post("/unsent", json=body)

        assert answer.status_code == 500
        (request,) = gateway.engine.submitted
        assert gateway.engine.cancellations == [request.request_id]
